"""vLLM's own benchmark beside the agent: its requests are rows, and its figures are the agent's.

Percentiles are the agent's within what it states; Prometheus' are as exact as the engine's buckets.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import pytest

from agent.analysis.quantiles import RELATIVE_ERROR
from tests.real_engine.percentile_errors import (
    HISTOGRAMS,
    LOADS,
    PERCENTS,
    Measured,
    Percentile,
    interpolated,
    measure,
)
from tests.real_engine.watching import (
    ENGINE,
    LIMITS,
    OBJECTIVE,
    SPANS_ARRIVE_WITHIN_S,
    Row,
    certainly_met,
    settings,
    times_seen,
)
from tests.real_parts.agent_process import AgentApi, AgentPorts, AgentProcess
from tests.real_parts.bench import BenchedRequest, BenchmarkRunner, Load
from tests.real_parts.collector import Collector, ReceivedSpan
from tests.real_parts.engine_server import MODEL
from tests.real_parts.metric_pages import total
from tests.real_parts.vllm import Vllm, span_request_id
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(1500)

# The table of the docs is of three times as many requests. At once come long prompts, most of which
# must wait longer than the limit.
SHORT_LOADS = [
    *(replace(load, prompts=load.prompts // 3) for load in LOADS[:-1]),
    Load(name="burst", requests_per_s=inf, prompts=32, input_tokens=256, output_tokens=32, seed=3),
]
# The engine reads the wall clock and the client a monotonic one. The two run apart by at most
# 0.5 ms a second while the wall clock is being corrected (adjtime(3)), and no wait here is longer.
CLOCKS_PART_BY_S = 0.001
# In README.md and docs/percentiles.md.
STATED = 0.0054

EACH_FIGURE = pytest.mark.parametrize("figure", list(HISTOGRAMS))
EACH_PERCENT = pytest.mark.parametrize("percent", PERCENTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """One run of the benchmark, an agent that saw no other request, and the forwarded spans."""

    measured: Measured
    spans: dict[str, ReceivedSpan]
    page: str
    api: AgentApi

    @property
    def rows(self) -> list[Row]:
        """The agent's rows."""
        return self.measured.rows

    @property
    def summary(self) -> dict[str, Any]:
        """The agent's summary of them."""
        return self.measured.summary

    def pairs(self) -> Iterator[tuple[BenchedRequest, Row]]:
        """Each request of the benchmark with its row."""
        rows = {row["request_id"]: row for row in self.rows}
        for result in self.measured.results:
            for request in result.requests:
                yield request, rows[request.request_id]


@pytest.fixture(scope="module")
def watched(
    engine: Vllm,
    benchmark: BenchmarkRunner,
    collector: Collector,
    ports: AgentPorts,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Watched]:
    """The run, and its agent."""
    folder = tmp_path_factory.mktemp("benchmark")
    with AgentProcess.with_settings(folder, ports, settings(engine, collector)) as agent:
        measured = measure(engine, agent.api, folder, benchmark, SHORT_LOADS)
        expected = {row["request_id"] for row in measured.rows}
        eventually(
            lambda: expected <= collector.spans().keys(),
            within_s=SPANS_ARRIVE_WITHIN_S,
            what="the forwarded spans",
        )
        page = agent.api.exposition()
        yield Watched(measured=measured, spans=collector.spans(), page=page, api=agent.api)


def test_every_request_of_the_benchmark_has_one_row_with_the_clients_tokens(
    watched: Watched,
) -> None:
    assert len(watched.rows) == sum(load.prompts for load in SHORT_LOADS)
    for request, row in watched.pairs():
        assert request.error == ""
        assert row["input_tokens"] == request.input_tokens, request
        assert row["output_tokens"] == request.output_tokens, request
        assert (row["engine"], row["model"]) == (ENGINE, MODEL)


def test_a_row_has_the_times_of_the_span(watched: Watched) -> None:
    for request, row in watched.pairs():
        span = watched.spans[request.request_id]
        assert row["ttft_s"] == pytest.approx(span.ttft_s), request
        assert row["tpot_s"] == pytest.approx(span.tpot_s), request
        assert row["trace_id"] == span.trace_id, request


def test_the_parts_of_a_row_add_up_to_its_total(watched: Watched) -> None:
    """Prefill and decode are the engine core's times, the total is the frontend's.

    A busy frontend sees the first token later than the core made it, so the rest may be negative.
    """
    left_over_s, whole_s = 0.0, 0.0
    for request, row in watched.pairs():
        told_s = row["queue_s"] + row["prefill_s"] + row["decode_s"] + row["front_s"]
        assert told_s + row["rest_s"] == pytest.approx(row["e2e_s"]), request
        assert row["front_s"] >= -CLOCKS_PART_BY_S, request
        streamed_s = row["ttft_s"] + row["tpot_s"] * (row["output_tokens"] - 1)
        left_over_s += abs(row["e2e_s"] - streamed_s)
        whole_s += row["e2e_s"]
    assert left_over_s < 0.1 * whole_s


def test_the_engines_tokens_are_never_later_than_the_clients(watched: Watched) -> None:
    for request, row in watched.pairs():
        assert 0 < row["ttft_s"] <= request.ttft_s + CLOCKS_PART_BY_S, request
        assert row["ttft_s"] <= row["e2e_s"] <= request.latency_s + CLOCKS_PART_BY_S, request


def test_a_verdict_is_that_of_the_times_of_the_span(watched: Watched) -> None:
    for request, row in watched.pairs():
        span = watched.spans[request.request_id]
        in_time = span.ttft_s <= LIMITS.ttft_ms / 1000
        good = in_time and row["tpot_s"] <= LIMITS.tpot_ms / 1000
        assert row["verdict"] == ("met" if good else "missed")
    assert {row["verdict"] for row in watched.rows} == {"met", "missed"}


def test_every_request_that_is_good_for_the_client_is_met(watched: Watched) -> None:
    verdicts = {request.request_id: row["verdict"] for request, row in watched.pairs()}
    good = [request for result in watched.measured.results for request in certainly_met(result)]
    assert good
    assert {verdicts[request.request_id] for request in good} == {"met"}


def test_the_summary_counts_the_rows(watched: Watched) -> None:
    rows, summary = watched.rows, watched.summary
    covered_s = summary["covered_s"]
    met = [row for row in rows if row["verdict"] == "met"]
    assert summary["requests"] == len(rows)
    assert summary["met"] == len(met)
    assert summary["missed"] == len(rows) - len(met)
    assert summary["undetermined"] == 0
    assert summary["attainment"] == pytest.approx(len(met) / len(rows))
    assert summary["goodput_rps"] == pytest.approx(len(met) / covered_s)
    assert summary["throughput_rps"] == pytest.approx(len(rows) / covered_s)
    for rate, of, tokens in (
        ("goodput_tokens_per_s", met, "output_tokens"),
        ("output_tokens_per_s", rows, "output_tokens"),
        ("input_tokens_per_s", rows, "input_tokens"),
    ):
        assert summary[rate] == pytest.approx(sum(row[tokens] for row in of) / covered_s), rate


def test_the_exposition_counts_the_rows(watched: Watched) -> None:
    of = {"engine": ENGINE, "model": MODEL}
    for verdict in ("met", "missed", "undetermined"):
        labels = {**of, "objective": OBJECTIVE, "verdict": verdict}
        expected = sum(row["verdict"] == verdict for row in watched.rows)
        assert total(watched.page, "llm_slo_requests_total", **labels) == expected, verdict
    within_limit = total(
        watched.page, "gen_ai_server_time_to_first_token_seconds_bucket", le="0.2", **of
    )
    assert within_limit == sum(row["ttft_s"] <= LIMITS.ttft_ms / 1000 for row in watched.rows)


# Percentiles


def one(watched: Watched, figure: str, percent: int) -> Percentile:
    """One percentile of one figure."""
    return next(
        one
        for one in watched.measured.percentiles
        if (one.figure, one.percent) == (figure, percent)
    )


def test_the_agent_publishes_the_error_of_its_percentiles(watched: Watched) -> None:
    assert watched.measured.relative_error == RELATIVE_ERROR
    assert round(RELATIVE_ERROR, 4) == STATED


@EACH_FIGURE
@EACH_PERCENT
def test_a_percentile_of_the_agent_is_within_its_stated_error_of_the_exact_one(
    watched: Watched, figure: str, percent: int
) -> None:
    assert abs(one(watched, figure, percent).agent_error) <= RELATIVE_ERROR


@EACH_FIGURE
def test_the_engines_buckets_count_the_values_that_the_agent_stored(
    watched: Watched, figure: str
) -> None:
    buckets = watched.measured.buckets[figure]
    values_s = watched.measured.values_s(figure)
    assert buckets == {bound: sum(value_s <= bound for value_s in values_s) for bound in buckets}


@EACH_FIGURE
@EACH_PERCENT
def test_histogram_quantile_is_exact_to_a_bucket_alone(
    watched: Watched, figure: str, percent: int
) -> None:
    """It returns a point on a line through the bucket, independent of the values in it."""
    percentile = one(watched, figure, percent)
    buckets = watched.measured.buckets[figure]
    prometheus_s, exact_s = percentile.prometheus_ms / 1000, percentile.exact_ms / 1000
    assert prometheus_s == pytest.approx(interpolated(buckets, percent / 100))
    bound = min(bound for bound in buckets if bound >= exact_s)
    assert bound < inf
    below = max((bound for bound in buckets if bound < exact_s), default=0.0)
    assert below <= prometheus_s <= bound


# Ids: one id does not mean one span.


def rows_of(api: AgentApi, request_id: str, *, expected: int) -> None:
    named = span_request_id(request_id)
    eventually(
        lambda: times_seen(api.requests(), {named})[named] == expected,
        within_s=SPANS_ARRIVE_WITHIN_S,
        what=f"{expected} rows of {named}",
    )
    detail = api.request(named)
    assert len(detail["others"]) == expected - 1
    spans = {(row["trace_id"], row["span_id"]) for row in (detail, *detail["others"])}
    assert len(spans) == expected


def test_every_answer_to_one_prompt_has_a_row(engine: Vllm, watched: Watched) -> None:
    engine.complete(request_id="three-answers", max_tokens=3, choices=3)
    rows_of(watched.api, "three-answers", expected=3)


def test_an_id_that_a_client_repeats_has_a_row_for_each_request(
    engine: Vllm, watched: Watched
) -> None:
    for _ in range(2):
        engine.complete(request_id="repeated", max_tokens=3)
    rows_of(watched.api, "repeated", expected=2)
