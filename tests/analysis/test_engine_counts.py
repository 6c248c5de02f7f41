"""What an engine counted lies where its own requests lie: histograms of the field's own library."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, inf
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from agent.analysis.engine_counts import LONGEST_BETWEEN_S, counts_between, total_counts
from agent.analysis.engine_figures import (
    CountedEngine,
    EngineFigures,
    engine_figures,
    figures_of_rows,
)
from agent.analysis.histogram_bounds import Bounds, all_within, quantile_bounds, share_bounds
from agent.catalog import engine_facts as fact
from agent.catalog.metric import Kind
from agent.records.engine import EngineSample, HistogramSnapshot
from agent.records.engine_counts import CountsRow, EngineCounts, GaugeSum
from agent.records.gpu import FactKey
from agent.records.objective import Match, Objective
from tests.analysis.cost.engine_days import engine_sample
from tests.records.making import NOON, objective
from tests.render.alerts.promtool import complaints
from tests.sources.engines.fixture_pages import body, translated_page

BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0)
LATENCIES = st.lists(st.floats(0.0005, 9.0), min_size=1, max_size=60)
QUANTILE = st.sampled_from([0.5, 0.9, 0.95, 0.99])


def observed(values: Iterable[float], buckets: Sequence[float] = BUCKETS) -> HistogramSnapshot:
    """A histogram of prometheus_client, which vLLM and SGLang measure with."""
    histogram = Histogram("latency", "of a test", buckets=buckets, registry=CollectorRegistry())
    for value in values:
        histogram.observe(value)
    samples = [each for family in histogram.collect() for each in family.samples]
    cumulative = {
        float(each.labels["le"]): each.value for each in samples if each.name == "latency_bucket"
    }
    total = next(each.value for each in samples if each.name == "latency_sum")
    return HistogramSnapshot(tuple(cumulative), tuple(cumulative.values()), total)


def holds(bounds: Bounds | None, value: float) -> bool:
    assert bounds is not None
    return bounds.lower <= value and (bounds.upper is None or value <= bounds.upper)


@given(LATENCIES, QUANTILE)
def test_a_percentile_lies_within_its_bounds_however_it_is_defined(
    values: list[float], q: float
) -> None:
    bounds = quantile_bounds(observed(values), q)
    assert holds(bounds, sorted(values)[ceil(q * len(values)) - 1])
    assert holds(bounds, float(np.quantile(values, q)))


def test_what_was_never_measured_has_no_bounds() -> None:
    assert quantile_bounds(observed([]), 0.5) is None
    assert share_bounds(observed([]), 1.0) is None


def test_the_estimate_is_the_one_of_prometheus(tmp_path: Path) -> None:
    histograms = {
        "skewed": observed([0.004, 0.03, 0.03, 0.07, 0.2, 0.3, 0.31, 2.0]),
        "high": observed([0.02, 6.0, 7.0, 8.0]),
        "one": observed([0.3]),
        "empty_between": observed([0.005, 0.005, 4.0]),
    }
    series = [
        {"series": f'h_bucket{{of="{name}",le="{_le(bound)}"}}', "values": f"{count:.0f}"}
        for name, each in histograms.items()
        for bound, count in zip(each.bounds, each.counts, strict=True)
    ]
    expressions = [
        f'histogram_quantile({q}, h_bucket{{of="{name}"}}) - {_estimate(each, q)!r}'
        for name, each in histograms.items()
        for q in (0.5, 0.9, 0.95, 0.99)
    ]
    expected = [
        {
            "expr": f"sum(abs({difference}) < bool 1e-12)",
            "eval_time": "0m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for difference in expressions
    ]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": expected}
    assert complaints(tmp_path, "groups: []", [test]) == ""


def _le(bound: float) -> str:
    return "+Inf" if bound == inf else str(bound)


def _estimate(histogram: HistogramSnapshot, q: float) -> float | None:
    bounds = quantile_bounds(histogram, q)
    assert bounds is not None
    return bounds.estimate


@given(LATENCIES, st.floats(0.001, 12.0) | st.sampled_from(BUCKETS))
def test_the_share_within_a_limit_lies_within_its_bounds(values: list[float], limit: float) -> None:
    bounds = share_bounds(observed(values), limit)
    share = sum(value <= limit for value in values) / len(values)
    assert holds(bounds, share)
    assert bounds is not None
    if limit in BUCKETS:
        assert bounds.lower == bounds.upper == share


@given(st.lists(st.tuples(st.floats(0.001, 9.0), st.floats(0.001, 9.0)), min_size=1, max_size=40))
def test_attainment_lies_within_its_bounds_however_the_latencies_depend_on_each_other(
    pairs: list[tuple[float, float]],
) -> None:
    chat = objective(ttft_s=0.4, e2e_s=2.0, tpot_s=None)
    found = figures(
        requests=len(pairs),
        ttft=observed(ttft for ttft, _ in pairs),
        e2e=observed(e2e for _, e2e in pairs),
        objectives=[chat],
    )
    (attained,) = found.attainment
    met = sum(ttft <= 0.4 and e2e <= 2.0 for ttft, e2e in pairs) / len(pairs)
    assert attained.lower <= met <= attained.upper


def figures(
    *,
    requests: float,
    ttft: HistogramSnapshot,
    e2e: HistogramSnapshot,
    objectives: Sequence[Objective],
    failed: float = 0.0,
) -> EngineFigures:
    counts = EngineCounts(
        covered_s=10.0,
        counters={
            (fact.REQUESTS_FINISHED.name, ("stop",)): requests,
            (fact.REQUESTS_FAILED.name, ("5xx",)): failed,
        },
        histograms={fact.TIME_TO_FIRST_TOKEN.name: ttft, fact.REQUEST_DURATION.name: e2e},
    )
    found = engine_figures([CountedEngine(model="llama", counts=counts)], objectives)
    assert found is not None
    return found


def test_limits_that_both_hold_for_most_requests_hold_together_for_at_least_the_overlap() -> None:
    overlapping = all_within([Bounds(0.9, 0.95), Bounds(0.97, 0.99)])
    assert overlapping is not None
    assert (overlapping.lower, overlapping.upper) == pytest.approx((0.87, 0.95))
    assert all_within([Bounds(0.2, 0.3), Bounds(0.4, 0.5)]) == Bounds(0.0, 0.3)


def test_a_request_that_failed_is_missed() -> None:
    fast = observed([0.02] * 8)
    found = figures(
        requests=8, ttft=fast, e2e=fast, failed=2, objectives=[objective(ttft_s=1.0, tpot_s=None)]
    )
    (attained,) = found.attainment
    assert (attained.lower, attained.upper) == pytest.approx((0.8, 0.8))
    assert found.goodput_rps is not None
    assert found.goodput_rps.lower == pytest.approx(0.8)


def test_an_error_that_is_counted_as_finished_and_by_its_status_failed_once() -> None:
    counts = EngineCounts(
        covered_s=10.0,
        counters={
            (fact.REQUESTS_FINISHED.name, ("stop",)): 7.0,
            (fact.REQUESTS_FINISHED.name, ("error",)): 1.0,
            (fact.REQUESTS_FINISHED.name, ("abort",)): 2.0,
            (fact.REQUESTS_FAILED.name, ("5xx",)): 3.0,
        },
    )
    found = engine_figures([CountedEngine(model="llama", counts=counts)], [])
    assert found is not None
    assert (found.requests, found.completed, found.failed, found.aborted) == (12, 7, 3, 2)


@pytest.mark.parametrize(
    "match",
    [
        *(Match(tenant="a"), Match(model="qwen"), Match(route="/v1/*")),
        Match(max_input_tokens=100),
    ],
)
def test_an_objective_for_some_requests_has_no_bounds_and_leaves_goodput_unknown(
    match: Match,
) -> None:
    fast = observed([0.02] * 8)
    every = objective(ttft_s=1.0, tpot_s=None)
    some = replace(every, name="b", match=match)
    alone = figures(requests=8, ttft=fast, e2e=fast, objectives=[some])
    both = figures(requests=8, ttft=fast, e2e=fast, objectives=[every, some])
    assert (alone.attainment, alone.goodput_rps, both.goodput_rps) == ([], None, None)


def scraped(
    at: float, output: float, values: Sequence[float] = (), started: float = -3600, **more: float
) -> EngineSample:
    """An engine whose counters stand at these values, so many seconds after noon."""
    sample = engine_sample(NOON + at, NOON + started, output=output, **more)
    return replace(sample, histograms={fact.TIME_TO_FIRST_TOKEN.name: observed(values)})


OUTPUT = (fact.OUTPUT_TOKENS.name, ())


def test_parts_of_a_time_add_up_to_what_was_counted_from_end_to_end() -> None:
    values = [0.02, 0.2, 0.3, 2.0, 7.0]
    scrapes = [scraped(5.0 * n, 10.0 * n, values[:n], running=float(n)) for n in range(5)]
    parts = [counts_between(*pair) for pair in pairwise(scrapes)]
    total = total_counts(each for each in parts if each is not None)
    assert total is not None
    assert (total.covered_s, total.counters[OUTPUT]) == (20.0, 40.0)
    assert total.histograms[fact.TIME_TO_FIRST_TOKEN.name].counts == observed(values[:4]).counts
    running = total.gauges[fact.REQUESTS_RUNNING.name, ()]
    assert (running.mean, running.maximum) == (2.0, 4.0)


# The second fell though nothing says so.
@pytest.mark.parametrize(("output", "started"), [(1200.0, 1), (20.0, -3600)])
def test_a_restarted_engine_counts_from_zero(output: float, started: float) -> None:
    counts = counts_between(scraped(0, 1000.0, [0.02] * 9), scraped(5, output, [0.3], started))
    assert counts is not None
    assert counts.counters[OUTPUT] == output
    assert counts.histograms[fact.TIME_TO_FIRST_TOKEN.name] == observed([0.3])


def of_ranks(at: float, ranks: int, output: float) -> EngineSample:
    known = {str(rank): scraped(at, output / ranks) for rank in range(ranks)} if ranks > 1 else {}
    return replace(scraped(at, output, ranks=ranks), ranks=known)


def test_the_whole_count_of_a_rank_that_comes_is_no_increase() -> None:
    assert counts_between(of_ranks(0, 1, 1e9), of_ranks(5, 2, 2e9)) is None


def test_the_increase_is_known_while_a_rank_leaves_whose_counts_are_kept() -> None:
    counts = counts_between(of_ranks(0, 2, 2e9), of_ranks(5, 1, 2e9 + 30))
    assert counts is not None
    assert counts.counters[OUTPUT] == 30


@pytest.mark.parametrize("at", [LONGEST_BETWEEN_S + 1, -5])
def test_what_came_while_the_engine_could_not_be_read_for_long_belongs_to_no_minute(
    at: float,
) -> None:
    assert counts_between(scraped(0, 0.0), scraped(at, 9.0)) is None


def test_histograms_with_other_buckets_add_up_at_the_bounds_that_both_have() -> None:
    def counted(*buckets: float) -> EngineCounts:
        name = fact.TIME_TO_FIRST_TOKEN.name
        return EngineCounts(covered_s=5.0, histograms={name: observed([0.3, 2.0], buckets)})

    total = total_counts([counted(0.1, 0.5, 1.0), counted(0.5, 5.0)])
    assert total is not None
    found = total.histograms[fact.TIME_TO_FIRST_TOKEN.name]
    assert (found.bounds, found.counts) == ((0.5, inf), (2.0, 4.0))


def test_what_no_engine_counts_is_unknown_and_not_zero() -> None:
    found = engine_figures([CountedEngine(model=None, counts=EngineCounts(covered_s=5.0))], [])
    assert found is not None
    assert (found.requests, found.output_tokens_per_s, found.kv_cache_usage) == (None, None, None)
    assert engine_figures([], []) is None


@pytest.mark.parametrize(
    ("second", "rate", "running"),
    [
        pytest.param((0.0, 100.0), 20.0, 8.0, id="side by side"),
        pytest.param((100.0, 200.0), 10.0, 4.0, id="one replaced the other"),
        pytest.param((50.0, 150.0), 2000 / 150, 8 * 100 / 150, id="for half of the time together"),
        pytest.param((200.0, 300.0), 10.0, 4.0, id="with a time in which none was seen"),
    ],
)
def test_rates_and_means_are_over_the_time_in_which_any_engine_was_seen(
    second: tuple[float, float], rate: float, running: float
) -> None:
    def row(engine: str, from_s: float, until_s: float) -> CountsRow:
        length_s = until_s - from_s
        running = GaugeSum(4.0 * length_s, length_s, 4.0)
        counts = EngineCounts(
            covered_s=length_s,
            counters={OUTPUT: 1000.0},
            gauges={(fact.REQUESTS_RUNNING.name, ()): running},
        )
        return CountsRow("agent-0", engine, "llama", 60, 0, until_s, counts)

    found = figures_of_rows([row("chat-0", 0.0, 100.0), row("chat-1", *second)], [])
    assert found is not None
    assert found.output_tokens_per_s == pytest.approx(rate)
    assert found.running == pytest.approx(running)


def test_a_time_in_which_another_engine_was_seen_longer_counts_once() -> None:
    def row(engine: str, from_s: float, until_s: float) -> CountsRow:
        counts = EngineCounts(covered_s=until_s - from_s)
        return CountsRow("agent-0", engine, "llama", 60, 0, until_s, counts)

    rows = [row("chat-0", 8.0, 9.0), row("chat-1", 20.0, 25.0), row("chat-2", 0.0, 10.0)]
    found = figures_of_rows(rows, [])
    assert found is not None
    assert found.covered_s == 15.0


def test_no_engine_was_seen_for_longer_than_all_together() -> None:
    """As after the clock was set back: an hour holds two."""
    row = CountsRow("agent-0", "chat-0", "llama", 3600, 0, 3600.0, EngineCounts(covered_s=7200.0))
    found = figures_of_rows([row, row._replace(starts_at=3600, until=3600.0)], [])
    assert found is not None
    assert found.covered_s == 14400.0


def test_the_fill_of_the_batch_is_over_the_time_of_each_engine() -> None:
    def one(covered_s: float, running: float) -> CountedEngine:
        gauges: dict[FactKey, GaugeSum] = {
            (fact.REQUESTS_RUNNING.name, ()): GaugeSum(running * covered_s, covered_s, running),
            (fact.MAX_RUNNING_REQUESTS.name, ()): GaugeSum(8.0 * covered_s, covered_s, 8.0),
        }
        return CountedEngine(model=None, counts=EngineCounts(covered_s=covered_s, gauges=gauges))

    found = engine_figures([one(300.0, 8.0), one(100.0, 0.0)], [])
    assert found is not None
    assert found.batch_fill == pytest.approx(0.75)


# What recorded pages of each engine say, against the pages as prometheus_client reads them

COUNTERS = {each.name for each in fact.ENGINE_FACTS if each.kind is Kind.COUNTER}
BETWEEN_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A page, its requests as a reader counts them, and the series of tokens and latencies."""

    page: str
    requests: float
    failed: float
    output: str
    latencies: str


RECORDED = (
    Recorded(
        page="vllm-0.32.0",
        # 11 finished, and 12 were refused because too many waited.
        requests=23,
        failed=12,
        output="vllm:generation_tokens_total",
        latencies="""ttft=vllm:time_to_first_token_seconds
            tpot=vllm:request_time_per_output_token_seconds itl=vllm:inter_token_latency_seconds
            e2e=vllm:e2e_request_latency_seconds queue=vllm:request_queue_time_seconds
            prefill=vllm:request_prefill_time_seconds decode=vllm:request_decode_time_seconds""",
    ),
    Recorded(
        page="sglang-0.5.23",
        requests=20,
        failed=0,
        output="sglang:generation_tokens_total",
        latencies="""ttft=sglang:time_to_first_token_seconds
            itl=sglang:inter_token_latency_seconds e2e=sglang:e2e_request_latency_seconds""",
    ),
    Recorded(
        page="tgi-3.3.7",
        requests=49,
        failed=9,
        output="tgi_request_generated_tokens_sum",
        latencies="""tpot=tgi_request_mean_time_per_token_duration e2e=tgi_request_duration
            queue=tgi_request_queue_duration""",
    ),
    Recorded(
        page="trtllm-1.3.0",
        requests=101,
        failed=1,
        output="trtllm_generation_tokens_total",
        latencies="""ttft=trtllm_time_to_first_token_seconds
            tpot=trtllm_time_per_output_token_seconds e2e=trtllm_e2e_request_latency_seconds
            queue=trtllm_request_queue_time_seconds""",
    ),
)
of_each = pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded.page)


def all_counted(recorded: Recorded) -> EngineFigures:
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


def series_of(recorded: Recorded, name: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(body(recorded.page).decode()):
        yield from (each for each in family.samples if each.name == name)


@of_each
def test_requests_and_tokens_are_those_of_the_page(recorded: Recorded) -> None:
    found = all_counted(recorded)
    assert (found.requests, found.failed) == (recorded.requests, recorded.failed)
    tokens = sum(each.value for each in series_of(recorded, recorded.output))
    assert found.output_tokens_per_s == pytest.approx(tokens / BETWEEN_S)


@of_each
def test_each_percentile_is_in_the_bucket_in_which_the_page_has_it(recorded: Recorded) -> None:
    found = all_counted(recorded).latencies
    for name, series in (each.split("=") for each in recorded.latencies.split()):
        counts: defaultdict[float, float] = defaultdict(float)
        for each in series_of(recorded, f"{series}_bucket"):
            counts[float(each.labels["le"])] += each.value
        edges = sorted(counts)
        total = counts[edges[-1]]
        assert found[name].count == total
        reached = next(edge for edge in edges if counts[edge] >= 0.95 * total)
        below = max((edge for edge in edges if counts[edge] < 0.95 * total), default=0.0)
        p95 = found[name].quantiles_ms["p95"]
        assert p95.lower <= 1000 * below + 1e-6
        assert p95.upper is None or p95.upper >= 1000 * reached - 1e-6
