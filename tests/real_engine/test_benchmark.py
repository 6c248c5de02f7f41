"""vLLM's own benchmark beside the agent, request by request, the engine crashing in between."""

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from typing import Any

import pytest

from tests.real_engine.watching import (
    DEADLY,
    ENGINE,
    LIMITS,
    OBJECTIVE,
    SCRAPED_WITHIN_S,
    SPANS_ARRIVE_WITHIN_S,
    Row,
    certainly_met,
    rows_once_there,
    times_seen,
)
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.bench import BenchedRequest, BenchmarkResult, BenchmarkRunner, Load
from tests.real_parts.collector import Collector, ReceivedSpan
from tests.real_parts.metric_pages import total
from tests.real_parts.vllm import MODEL, SpanExport, Vllm, span_request_id
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(1500)

LOADS = {
    "grpc": (
        Load(name="calm", requests_per_s=4, prompts=16),
        Load(name="busy", requests_per_s=8, prompts=24),
        # All at once, with long prompts: most must wait longer than the limit.
        Load(name="burst", requests_per_s=inf, prompts=24, input_tokens=256),
    ),
    "http/protobuf": (Load(name="other-protocol", requests_per_s=8, prompts=24),),
}
IN_FLIGHT = "in-flight"
WINDOW = "1h"
# The engine reads the wall clock and the client a monotonic one. The two run apart by at most
# 0.5 ms a second while the wall clock is being corrected (adjtime(3)), and no wait here is longer.
CLOCKS_PART_BY_S = 0.001
# The agent states 0.54 % for its percentiles.
QUANTILE_ERROR = 0.0055


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The benchmark's results, the agent's rows, and the spans."""

    results: dict[str, list[BenchmarkResult]]
    rows: list[Row]
    spans: dict[str, ReceivedSpan]
    summary: dict[str, Any]
    page: str
    events: list[dict[str, Any]]
    events_afar: list[dict[str, Any]]

    def row(self, request: BenchedRequest) -> Row:
        """The agent's row of one request of the benchmark."""
        return next(row for row in self.rows if row["request_id"] == request.request_id)


def ids(results: Sequence[BenchmarkResult]) -> set[str]:
    return {request.request_id for result in results for request in result.requests}


@pytest.fixture(scope="module")
def afar(engine: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """An agent as on another machine: it reads only the engine's exposition."""
    seen = {"name": ENGINE, "url": engine.url, "scrape_interval": "1s", "same_machine": False}
    configured = {"engines": [seen], "nvml": {"enabled": False}}
    folder = tmp_path_factory.mktemp("afar")
    with AgentProcess.with_settings(folder, AgentPorts.free(), configured) as running:
        yield running


def wait_for_events(agent: AgentProcess, kind: str) -> list[dict[str, Any]]:
    """Every event of the agent, oldest first, as soon as one of them is of this kind."""

    def read() -> list[dict[str, Any]]:
        events = sorted(agent.api.events(), key=lambda event: str(event["at"]))
        return events if kind in [event["kind"] for event in events] else []

    return eventually(read, within_s=SCRAPED_WITHIN_S, what=kind)


def killed_and_restarted(
    engine: Vllm, agent: AgentProcess, afar: AgentProcess
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Kill the API server under a request, start the engine again; the events of both agents."""
    with engine.streaming(request_id=IN_FLIGHT, max_tokens=1500):
        os.kill(engine.front_pid, signal.SIGKILL)
    wait_for_events(agent, "ENGINE_DEAD")
    wait_for_events(afar, "UNREACHABLE")
    engine.kill()
    engine.start()
    return wait_for_events(agent, "RESTART"), wait_for_events(afar, "RESTART")


@pytest.fixture(scope="module")
def watched(
    engine: Vllm,
    benchmark: BenchmarkRunner,
    agent: AgentProcess,
    afar: AgentProcess,
    collector: Collector,
    ports: AgentPorts,
    tmp_path_factory: pytest.TempPathFactory,
) -> Watched:
    """One agent all the time; an engine that crashes between its runs over gRPC and over HTTP."""

    def run(protocol: str) -> list[BenchmarkResult]:
        folder: Path = tmp_path_factory.mktemp("benchmark")
        results = benchmark.run(engine, LOADS[protocol], LIMITS, folder)
        rows_once_there(agent.api, ids(results))
        return results

    over_grpc = run("grpc")
    engine.send_spans(SpanExport.http(ports.http))
    events, events_afar = killed_and_restarted(engine, agent, afar)
    over_http = run("http/protobuf")
    expected = ids(over_grpc + over_http)
    eventually(
        lambda: expected <= collector.spans().keys(),
        within_s=SPANS_ARRIVE_WITHIN_S,
        what="the forwarded spans",
    )
    return Watched(
        results={"grpc": over_grpc, "http/protobuf": over_http},
        rows=agent.api.requests(),
        spans=collector.spans(),
        summary=agent.api.summary(window=WINDOW),
        page=agent.api.exposition(),
        events=events,
        events_afar=events_afar,
    )


@pytest.fixture(params=list(LOADS))
def results(request: pytest.FixtureRequest, watched: Watched) -> list[BenchmarkResult]:
    """The runs over one protocol."""
    return watched.results[request.param]


def requests_of(results: Sequence[BenchmarkResult]) -> Iterator[BenchedRequest]:
    for result in results:
        yield from result.requests


def test_every_request_of_the_benchmark_has_one_row(
    watched: Watched, results: list[BenchmarkResult]
) -> None:
    assert [request.error for request in requests_of(results) if request.error] == []
    assert times_seen(watched.rows, ids(results)) == dict.fromkeys(ids(results), 1)


def test_a_row_has_the_token_counts_of_the_client(
    watched: Watched, results: list[BenchmarkResult]
) -> None:
    for request in requests_of(results):
        row = watched.row(request)
        assert row["input_tokens"] == request.input_tokens, request
        assert row["output_tokens"] == request.output_tokens, request


def test_a_row_has_the_times_of_the_span(watched: Watched, results: list[BenchmarkResult]) -> None:
    for request in requests_of(results):
        row, span = watched.row(request), watched.spans[request.request_id]
        assert row["ttft_s"] == pytest.approx(span.ttft_s), request
        assert row["tpot_s"] == pytest.approx(span.tpot_s), request
        assert row["trace_id"] == span.trace_id, request


def test_the_parts_of_a_row_add_up_to_its_total(
    watched: Watched, results: list[BenchmarkResult]
) -> None:
    """Prefill and decode are the engine core's times, the total is the frontend's.

    A busy frontend sees the first token later than the core made it, so the rest may be negative.
    """
    left_over_s, whole_s = 0.0, 0.0
    for request in requests_of(results):
        row = watched.row(request)
        told_s = row["queue_s"] + row["prefill_s"] + row["decode_s"] + row["front_s"]
        assert told_s + row["rest_s"] == pytest.approx(row["e2e_s"]), request
        assert row["front_s"] >= -CLOCKS_PART_BY_S, request
        streamed_s = row["ttft_s"] + row["tpot_s"] * (row["output_tokens"] - 1)
        left_over_s += abs(row["e2e_s"] - streamed_s)
        whole_s += row["e2e_s"]
    assert left_over_s < 0.1 * whole_s


def test_the_engines_tokens_are_never_later_than_the_clients(
    watched: Watched, results: list[BenchmarkResult]
) -> None:
    for request in requests_of(results):
        row = watched.row(request)
        assert 0 < row["ttft_s"] <= request.ttft_s + CLOCKS_PART_BY_S, request
        assert row["ttft_s"] <= row["e2e_s"] <= request.latency_s + CLOCKS_PART_BY_S, request


def test_goodput_is_that_of_the_benchmarks_file_on_the_engines_times(
    watched: Watched, results: list[BenchmarkResult]
) -> None:
    for result in results:
        spans = [watched.spans[request.request_id] for request in result.requests]
        good = sum(
            span.ttft_s <= LIMITS.ttft_ms / 1000 and span.tpot_s <= LIMITS.tpot_ms / 1000
            for span in spans
        )
        met = sum(watched.row(request)["verdict"] == "met" for request in result.requests)
        assert met / result.duration_s == good / result.duration_s, result.load


def test_every_request_that_is_good_for_the_client_is_met(
    watched: Watched, results: list[BenchmarkResult]
) -> None:
    good = [request for result in results for request in certainly_met(result)]
    assert good
    assert {watched.row(request)["verdict"] for request in good} == {"met"}


def test_the_load_has_both_met_and_missed_requests(watched: Watched) -> None:
    assert {row["verdict"] for row in watched.rows} == {"met", "missed"}


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


@pytest.mark.parametrize("measure", ["ttft", "tpot", "e2e", "queue"])
@pytest.mark.parametrize("percent", [50, 95, 99])
def test_a_percentile_is_within_its_stated_error_of_the_exact_one(
    watched: Watched, measure: str, percent: int
) -> None:
    values_ms = sorted(row[f"{measure}_s"] * 1000 for row in watched.rows)
    exact_ms = values_ms[ceil(percent / 100 * len(values_ms)) - 1]
    published_ms = watched.summary[f"{measure}_ms"][f"p{percent}"]
    assert published_ms == pytest.approx(exact_ms, rel=QUANTILE_ERROR)


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


def test_every_row_names_the_engine_and_the_model_it_serves(watched: Watched) -> None:
    assert {(row["engine"], row["model"]) for row in watched.rows} == {(ENGINE, MODEL)}


def test_a_request_in_flight_when_the_engine_crashed_is_not_reported(watched: Watched) -> None:
    assert times_seen(watched.rows, {span_request_id(IN_FLIGHT)}) == {span_request_id(IN_FLIGHT): 0}


def test_a_killed_api_server_is_one_death_and_one_restart(watched: Watched) -> None:
    kinds = [event["kind"] for event in watched.events]
    assert kinds.count("ENGINE_DEAD") == kinds.count("RESTART") == 1
    assert DEADLY.intersection(kinds) == {"ENGINE_DEAD"}
    assert {event["engine"] for event in watched.events} == {ENGINE}
    restart = next(event for event in watched.events if event["kind"] == "RESTART")
    assert (restart["confidence"], restart["evidence"]["gone_s"] > 0) == ("certain", True)


def test_from_another_machine_a_killed_api_server_is_unreachable_and_then_restarted(
    watched: Watched,
) -> None:
    assert [event["kind"] for event in watched.events_afar] == ["UNREACHABLE", "RESTART"]
