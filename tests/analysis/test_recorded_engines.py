"""What recorded pages of each engine say, against the pages as prometheus_client reads them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from agent.analysis.engine_counts import counts_between
from agent.analysis.engine_figures import CountedEngine, EngineFigures, engine_figures
from agent.catalog.engine_facts import ENGINE_FACTS
from agent.catalog.metric import Kind
from agent.records.engine import EngineSample, HistogramSnapshot
from tests.sources.engines.fixture_pages import body, translated_page

COUNTERS = {fact.name for fact in ENGINE_FACTS if fact.kind is Kind.COUNTER}
BETWEEN_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A page, its requests as a reader counts them, and the series of tokens and latencies."""

    page: str
    requests: float
    failed: float
    output: str
    latencies: Mapping[str, str]


RECORDED = (
    Recorded(
        page="vllm-0.32.0",
        # 11 finished, and 12 were refused because too many waited.
        requests=23,
        failed=12,
        output="vllm:generation_tokens_total",
        latencies={
            "ttft": "vllm:time_to_first_token_seconds",
            "tpot": "vllm:request_time_per_output_token_seconds",
            "itl": "vllm:inter_token_latency_seconds",
            "e2e": "vllm:e2e_request_latency_seconds",
            "queue": "vllm:request_queue_time_seconds",
            "prefill": "vllm:request_prefill_time_seconds",
            "decode": "vllm:request_decode_time_seconds",
        },
    ),
    Recorded(
        page="sglang-0.5.23",
        requests=20,
        failed=0,
        output="sglang:generation_tokens_total",
        latencies={
            "ttft": "sglang:time_to_first_token_seconds",
            "itl": "sglang:inter_token_latency_seconds",
            "e2e": "sglang:e2e_request_latency_seconds",
        },
    ),
    Recorded(
        page="tgi-3.3.7",
        requests=49,
        failed=9,
        output="tgi_request_generated_tokens_sum",
        latencies={
            "tpot": "tgi_request_mean_time_per_token_duration",
            "e2e": "tgi_request_duration",
            "queue": "tgi_request_queue_duration",
        },
    ),
    Recorded(
        page="trtllm-1.3.0",
        requests=101,
        failed=1,
        output="trtllm_generation_tokens_total",
        latencies={
            "ttft": "trtllm_time_to_first_token_seconds",
            "tpot": "trtllm_time_per_output_token_seconds",
            "e2e": "trtllm_e2e_request_latency_seconds",
            "queue": "trtllm_request_queue_time_seconds",
        },
    ),
)
of_each = pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded.page)


def figures_of(recorded: Recorded) -> EngineFigures:
    """All that the engine counted since it began, as if that were half a minute ago."""
    found = translated_page(recorded.page)
    now = EngineSample(
        engine="engine",
        at=BETWEEN_S,
        dialect=found.dialect.engine,
        model=found.model,
        facts=found.facts,
        histograms=found.histograms,
    )
    begin = replace(
        now,
        at=0.0,
        facts={k: 0.0 if k[0] in COUNTERS else value for k, value in now.facts.items()},
        histograms={name: _empty(each) for name, each in now.histograms.items()},
    )
    counts = counts_between(begin, now)
    assert counts is not None
    figures = engine_figures([CountedEngine(model=now.model, counts=counts)], [])
    assert figures is not None
    return figures


def _empty(histogram: HistogramSnapshot) -> HistogramSnapshot:
    return HistogramSnapshot(histogram.bounds, (0.0,) * len(histogram.bounds), 0.0)


def samples(recorded: Recorded, name: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(body(recorded.page).decode()):
        yield from (each for each in family.samples if each.name == name)


@of_each
def test_requests_and_tokens_are_those_of_the_page(recorded: Recorded) -> None:
    found = figures_of(recorded)
    assert (found.requests, found.failed) == (recorded.requests, recorded.failed)
    tokens = sum(each.value for each in samples(recorded, recorded.output))
    assert found.output_tokens_per_s == pytest.approx(tokens / BETWEEN_S)


@of_each
def test_each_percentile_is_in_the_bucket_in_which_the_page_has_it(recorded: Recorded) -> None:
    found = figures_of(recorded).latencies
    assert found.keys() >= recorded.latencies.keys()
    for name, series in recorded.latencies.items():
        counts: defaultdict[float, float] = defaultdict(float)
        for each in samples(recorded, f"{series}_bucket"):
            counts[float(each.labels["le"])] += each.value
        edges = sorted(counts)
        total = counts[edges[-1]]
        assert found[name].count == total
        reached = next(edge for edge in edges if counts[edge] >= 0.95 * total)
        below = max((edge for edge in edges if counts[edge] < 0.95 * total), default=0.0)
        p95 = found[name].quantiles_ms["p95"]
        assert p95.lower <= 1000 * below + 1e-6
        assert p95.upper is None or p95.upper >= 1000 * reached - 1e-6
