"""Rows of the agent beside the real engine with its plugin: none of its requests is missing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.real_engine.watching import ENGINE, SPANS_ARRIVE_WITHIN_S, Row, settings
from tests.real_parts.agent_process import AgentPorts, AgentProcess, HastyAgent
from tests.real_parts.collector import Collector
from tests.real_parts.metric_pages import total
from tests.real_parts.vllm import Vllm, span_request_id
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(1500)

ABANDONED = tuple(f"abandoned-{number}" for number in range(5))
LONGEST = 1500
FINISHED = ("finished-1", "finished-2")
CHOICES = "three-choices"


def counted(engine: Vllm) -> dict[str, float]:
    page = engine.exposition()
    names = ("prompt_tokens_total", "generation_tokens_total", "num_requests_running")
    return {name: total(page, f"vllm:{name}") for name in names}


@pytest.fixture(scope="module")
def agent(
    engine: Vllm,
    ports: AgentPorts,
    collector: Collector,
    plugin_socket: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[AgentProcess]:
    """An agent with a new database that listens for the plugin."""
    chosen: dict[str, Any] = settings(engine, collector)
    chosen["engines"][0]["plugin_socket"] = str(plugin_socket)
    with HastyAgent.with_settings(tmp_path_factory.mktemp("agent"), ports, chosen) as running:
        yield running


@pytest.fixture(scope="module")
def grown(engine: Vllm, agent: AgentProcess) -> dict[str, float]:
    """What the engine counted of requests that ended and of others whose clients left."""
    before = counted(engine)
    for request_id in ABANDONED:
        with engine.streaming(request_id=request_id, max_tokens=LONGEST):
            pass
    for request_id in FINISHED:
        engine.complete(request_id=request_id, max_tokens=6)
    engine.complete(request_id=CHOICES, max_tokens=4, choices=3)
    eventually(
        lambda: counted(engine)["num_requests_running"] == 0,
        within_s=SPANS_ARRIVE_WITHIN_S,
        what="an idle engine",
    )
    after = counted(engine)
    return {name: after[name] - before[name] for name in before}


@pytest.fixture(scope="module")
def rows(agent: AgentProcess, grown: dict[str, float], collector: Collector) -> list[Row]:
    """The rows of all these requests; those of clients that left come 5 s later.

    A span that comes later still replaces the row of its request.
    """
    names = {span_request_id(name) for name in (*ABANDONED, *FINISHED, CHOICES)}
    expected = len(names) + 2

    def found() -> list[Row]:
        of_these = [row for row in agent.api.requests() if row["request_id"] in names]
        traces = {span.trace_id.hex() for span in collector.received()}
        told = [
            row
            for row in of_these
            if row["preemptions"] is not None
            and (row["finish_reason"] == "abort" or row["trace_id"] in traces)
        ]
        return told if len(told) == len(of_these) == expected else []

    return eventually(found, within_s=SPANS_ARRIVE_WITHIN_S, what=f"{expected} rows")


def test_a_request_whose_client_left_is_a_row(rows: list[Row]) -> None:
    left = [row for row in rows if row["finish_reason"] == "abort"]
    assert {row["request_id"] for row in left} <= {span_request_id(name) for name in ABANDONED}
    # On a busy machine the engine may finish a request before it notices that the client left.
    assert left
    for row in left:
        assert (row["status"], row["vantage"], row["engine"]) == ("cancelled", "engine", ENGINE)
        assert 0 < row["output_tokens"] < LONGEST
        assert 0 < row["ttft_s"] <= row["e2e_s"]
        assert row["queue_s"] + row["prefill_s"] <= row["e2e_s"]


def test_a_request_that_finished_has_one_row_of_its_span(rows: list[Row]) -> None:
    finished = [row for row in rows if row["finish_reason"] != "abort"]
    assert len(finished) >= len(FINISHED) + 3
    for row in finished:
        assert (row["status"], row["preemptions"]) == ("ok", 0)
        assert row["cached_tokens"] is not None


def test_no_token_that_the_engine_counted_is_missing(
    rows: list[Row], grown: dict[str, float]
) -> None:
    assert sum(row["input_tokens"] for row in rows) == grown["prompt_tokens_total"]
    assert sum(row["output_tokens"] for row in rows) == grown["generation_tokens_total"]


def test_the_agent_says_that_the_plugin_is_there(agent: AgentProcess, rows: list[Row]) -> None:
    page = agent.api.exposition()
    assert total(page, "llm_engine_plugin_up", engine=ENGINE) == 1
    records = "llm_engine_plugin_records_total"
    assert total(page, records, engine=ENGINE, kind="step") > len(rows)
    assert total(page, records, engine=ENGINE, kind="request") >= len(rows)
