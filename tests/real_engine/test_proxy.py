"""The real vLLM behind the proxy: what its benchmark's client saw is what the agent stored."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.real_engine.watching import (
    ENGINE,
    LIMITS,
    OBJECTIVE,
    SPANS_ARRIVE_WITHIN_S,
    Row,
    rows_once_there,
    settings,
    times_seen,
)
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.bench import BenchedRequest, Benchmark, BenchmarkResult, Load
from tests.real_parts.collector import Collector
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import Vllm
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(900)

LOADS = (
    # A client's first requests pay for its own start, before the proxy hears of them.
    Load(name="proxied-first", requests_per_s=4, prompts=6),
    Load(name="proxied-calm", requests_per_s=2, prompts=24),
    Load(name="proxied-busy", requests_per_s=6, prompts=24),
    # Nearly at once, with long prompts: most must wait longer than the limit. Sent all together,
    # each would wait for the client itself, whose clock runs already.
    Load(name="proxied-burst", requests_per_s=100, prompts=24, input_tokens=256),
)
# What a user's clock and the proxy's may differ by.
SAME_S = 0.005
SAME_RATIO = 0.05
SAME_TPOT_RATIO = 0.03
# A client that the machine did not let run when its answer came tells a later time than the wire's.
ATTEMPTS = 8
LONGEST = 1500


def asked_id(request: BenchedRequest) -> str:
    """The X-Request-Id that the benchmark sent."""
    return request.request_id.removeprefix("cmpl-").removesuffix("-0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxied:
    """An agent whose proxy stands before the engine."""

    agent: AgentProcess
    url: str


@pytest.fixture(scope="module")
def proxied(
    engine: Vllm,
    ports: AgentPorts,
    collector: Collector,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Proxied]:
    """An agent of its own, on the ports that the engine sends its spans to."""
    port = free_port()
    told = settings(engine, collector) | {
        "proxy": {"listen": f"127.0.0.1:{port}", "engine": ENGINE}
    }
    folder = tmp_path_factory.mktemp("proxied")
    with AgentProcess.with_settings(folder, ports, told) as agent:
        agent.put_first()
        yield Proxied(agent=agent, url=f"http://127.0.0.1:{port}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the benchmark measured through the proxy, and the rows that the agent made of it."""

    results: list[BenchmarkResult]
    rows: dict[str, Row]
    summary: dict[str, Any]

    @property
    def pairs(self) -> list[tuple[BenchedRequest, Row]]:
        """Each request of the benchmark with its row."""
        requests = [request for result in self.results for request in result.requests]
        return [(request, self.rows[asked_id(request)]) for request in requests]


@pytest.fixture(scope="module")
def measured(engine: Vllm, proxied: Proxied, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """The first attempt in which nothing stood in the client's way, else the last one."""
    for attempt in range(ATTEMPTS):
        folder = tmp_path_factory.mktemp("proxied-benchmark")
        loads = [replace(load, name=f"{load.name}-{attempt}") for load in LOADS]
        found = _measured(
            engine, proxied, Benchmark(engine, loads, LIMITS, folder, url=proxied.url)
        )
        if not differing(found) and not tpots_differing(found):
            break
    return found


def _measured(engine: Vllm, proxied: Proxied, benchmark: Benchmark) -> Measured:
    # Where the engine takes the client's core, the client's figures tell of that and nothing else.
    with engine.on_fewer_cores():
        first, *results = benchmark.results()
    assert len(first.requests) == LOADS[0].prompts
    wanted = {asked_id(request) for result in results for request in result.requests}
    api = proxied.agent.api

    def joined() -> list[Row]:
        rows = rows_once_there(api, wanted)
        return rows if all(row["vantage"] == "joined" for row in rows) else []

    rows = eventually(joined, within_s=SPANS_ARRIVE_WITHIN_S, what="joined rows")
    assert times_seen(rows, wanted) == dict.fromkeys(wanted, 1)
    return Measured(
        results=results,
        rows={row["request_id"]: row for row in rows},
        summary=api.summary(window="1h"),
    )


def test_the_views_of_every_request_are_one_row(measured: Measured) -> None:
    for request, row in measured.pairs:
        assert row["status"] == "ok", request
        assert (row["engine"], row["route"]) == (ENGINE, "/v1/completions")
        assert row["queue_s"] is not None
        assert row["engine_ttft_s"] > 0
        assert row["holdback_s"] == pytest.approx(row["ttft_s"] - row["engine_ttft_s"])
    assert measured.summary["requests"] == len(measured.rows)


def apart(told_s: float, seen_s: float, ratio: float) -> bool:
    """Whether two clocks of one machine cannot have meant the same moment."""
    return told_s != pytest.approx(seen_s, abs=SAME_S, rel=ratio)


def differing(measured: Measured) -> list[tuple[BenchedRequest, float, float]]:
    """The requests whose TTFT or whole time is not what their client saw, with the stored ones."""
    return [
        (request, row["ttft_s"], row["e2e_s"])
        for request, row in measured.pairs
        if apart(row["ttft_s"], request.ttft_s, SAME_RATIO)
        or apart(row["e2e_s"], request.latency_s, SAME_RATIO)
    ]


def tpots_differing(measured: Measured) -> list[tuple[BenchedRequest, float]]:
    """The requests whose TPOT is not what their client saw, with the stored ones."""
    return [
        (request, row["tpot_s"])
        for request, row in measured.pairs
        if row["tpot_s"] != pytest.approx(request.tpot_s, rel=SAME_TPOT_RATIO)
    ]


def test_the_times_of_a_request_are_those_of_its_client(measured: Measured) -> None:
    assert differing(measured) == []


def test_the_time_per_token_of_a_request_is_the_clients(measured: Measured) -> None:
    assert tpots_differing(measured) == []


def test_no_client_had_its_first_token_before_the_proxy_had_it(measured: Measured) -> None:
    for request, row in measured.pairs:
        assert row["ttft_s"] < request.ttft_s


def test_the_tokens_are_those_that_the_client_was_told(measured: Measured) -> None:
    for request, row in measured.pairs:
        assert row["input_tokens"] == request.input_tokens
        assert row["output_tokens"] == request.output_tokens


def on_the_edge(request: BenchedRequest) -> bool:
    """Whether the client's own verdict hangs on less than its clock can tell."""
    return not (
        apart(LIMITS.ttft_ms / 1000, request.ttft_s, SAME_RATIO)
        and apart(LIMITS.tpot_ms / 1000, request.tpot_s, SAME_TPOT_RATIO)
    )


def test_goodput_is_the_benchmarks_own(measured: Measured) -> None:
    for result in measured.results:
        verdicts = [measured.rows[asked_id(request)]["verdict"] for request in result.requests]
        good = round(result.goodput_rps * result.duration_s)
        uncertain = sum(map(on_the_edge, result.requests))
        assert abs(verdicts.count("met") - good) <= uncertain, result.load


def test_the_load_has_both_met_and_missed_what_was_promised(measured: Measured) -> None:
    assert {row["verdict"] for row in measured.rows.values()} == {"met", "missed"}


def test_the_largest_gap_is_at_least_the_mean_one(measured: Measured) -> None:
    for _, row in measured.pairs:
        assert row["max_gap_s"] >= row["tpot_s"]


def test_the_metrics_page_counts_each_request_once_where_it_was_seen(
    proxied: Proxied, measured: Measured
) -> None:
    page = proxied.agent.api.page()
    name = "gen_ai_server_time_to_first_token_seconds_count"
    assert total(page, name, vantage="proxy") == len(measured.rows)
    verdicts = [row["verdict"] for row in measured.rows.values()]
    for verdict in ("met", "missed"):
        counted = total(page, "llm_slo_requests_total", objective=OBJECTIVE, verdict=verdict)
        assert counted == verdicts.count(verdict)


def test_who_leaves_is_told_so_and_frees_the_engine_within_a_second(
    engine: Vllm, proxied: Proxied
) -> None:
    def running() -> float:
        return total(engine.page(), "vllm:num_requests_running")

    with engine.streaming(request_id="left", max_tokens=LONGEST, url=proxied.url):
        eventually(lambda: running() == 1, within_s=10.0, what="a request at work")
    eventually(lambda: running() == 0, within_s=1.0, what="an engine that is free again")
    row = next(
        row for row in rows_once_there(proxied.agent.api, {"left"}) if row["request_id"] == "left"
    )
    assert (row["status"], row["vantage"]) == ("cancelled", "proxy")
    assert (row["http_status"], row["finish_reason"]) == (200, None)
    assert row["ttft_s"] < row["e2e_s"]
