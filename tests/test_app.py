"""The running agent beside the simulator: one process each, as a user starts them."""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from agent.catalog.engine_facts import ENGINE_FACTS
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.span_sender import SpanSender, request_span
from tests.real_parts.waiting import eventually
from tests.simulated import MODEL, WITHIN_S, Simulator, rows_in

FACTS = {fact.name for fact in ENGINE_FACTS}


def facts_of(agent: AgentProcess, engine: str) -> set[str]:
    """The facts of this engine in the agent's exposition."""
    return {
        family.name
        for family in text_string_to_metric_families(agent.api.exposition())
        for sample in family.samples
        if family.name in FACTS and sample.labels["engine"] == engine
    }


def up(agent: AgentProcess, engine: str) -> float:
    return total(agent.api.exposition(), "llm_engine_up", engine=engine)


def get(agent: AgentProcess, path: str) -> requests.Response:
    return requests.get(f"{agent.url}{path}", timeout=30)


# One engine and no file


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """The agent of `run --engine URL` after some requests; the engine keeps running."""
    folder, ports = tmp_path_factory.mktemp("watched"), AgentPorts.free()
    with (
        Simulator(folder, grpc=ports.grpc) as engine,
        AgentProcess.without_file(folder, ports, engine.url) as agent,
    ):
        rows_in(agent, 50)
        yield agent


def test_each_request_has_a_row_with_the_engine_and_the_model(watched: AgentProcess) -> None:
    rows = watched.api.requests(limit="1000")
    assert len({row["trace_id"] + row["span_id"] for row in rows}) == len(rows)
    for row in rows:
        assert (row["engine"], row["model"], row["vantage"]) == ("engine-0", MODEL, "engine")
        assert (row["status"], row["service_name"]) == ("ok", "engine-0")
        assert all(row[name] > 0 for name in ("ttft_s", "e2e_s", "input_tokens", "output_tokens"))
        assert row["ttft_s"] <= row["e2e_s"]
        assert row["started_at"] < row["ended_at"]
        # No source gives these values.
        assert row["tenant"] is row["route"] is row["http_status"] is row["cost_usd"] is None


def test_each_verdict_follows_from_the_row_itself(watched: AgentProcess) -> None:
    for row in watched.api.requests(limit="1000"):
        late = row["ttft_s"] > 0.2
        slow = row["output_tokens"] > 1 and row["tpot_s"] > 0.12
        assert row["verdict"] == ("missed" if late or slow else "met")
        assert row["verdicts"] == {"chat": row["verdict"]}


def test_the_agent_is_ready_and_shows_the_engine(watched: AgentProcess) -> None:
    ready = get(watched, "/readyz")
    parts = {"store": "ok", "receivers": "ok", "engines": "ok", "proxy": "not configured"}
    parts |= {"plugins": "not configured", "stages": "ok", "queues": "ok", "jobs": "ok"}
    assert ready.status_code == 200
    response = ready.json()
    assert response["parts"].pop("setup").startswith("1 of 1 engines could show more")
    # It depends on the machine.
    assert response["parts"].pop("gpus")
    assert response == {"status": "ok", "problems": [], "parts": parts}
    assert up(watched, "engine-0") == 1
    assert len(facts_of(watched, "engine-0")) > 15
    (engine,) = get(watched, "/api/v1/engines").json()["items"]
    assert (engine["name"], engine["up"], engine["model"]) == ("engine-0", True, MODEL)
    assert engine["dialect"] == "vllm"
    assert None not in (engine["running"], engine["waiting"], engine["kv_cache_usage"])
    assert watched.api.summary()["simulated"] is False
    (objective,) = get(watched, "/api/v1/objectives").json()["items"]
    assert (objective["name"], objective["definition"]["is_preset"]) == ("chat", True)
    page = watched.api.exposition()
    assert 'simulated="false"' in page
    # Nothing pages about a promise that nobody made.
    assert 'llm_slo_configured{objective="chat"} 0.0' in page


# Engines that come and go


def test_an_engine_may_start_late_and_stop_early(tmp_path: Path) -> None:
    ports, port = AgentPorts.free(), free_port()
    settings = {"engines": [_engine("chat-0", f"http://127.0.0.1:{port}")]}
    with AgentProcess.with_settings(tmp_path, ports, settings) as agent:
        assert get(agent, "/readyz").status_code == 200
        assert up(agent, "chat-0") == 0
        assert agent.api.summary()["attainment"] is None
        with Simulator(tmp_path, grpc=ports.grpc, service="chat-0", port=port) as engine:
            eventually(lambda: up(agent, "chat-0") == 1, within_s=WITHIN_S, what="an engine")
            rows_in(agent, 20)
            engine.process.stop()
        eventually(lambda: up(agent, "chat-0") == 0, within_s=WITHIN_S, what="its end")
        assert facts_of(agent, "chat-0") == set()
        eventually(
            lambda: agent.api.events(engine="chat-0", kind="UNREACHABLE"),
            within_s=WITHIN_S,
            what="the event",
        )
        assert get(agent, "/readyz").status_code == 200
        _assert_that_everything_agrees(agent)


def _engine(name: str, url: str) -> dict[str, str]:
    return {"name": name, "url": url, "scrape_interval": "1s"}


def _assert_that_everything_agrees(agent: AgentProcess) -> None:
    """Rows, summary, time series and exposition agree after the engine's last request."""
    rows = agent.api.requests(limit="1000")
    summary, page = agent.api.summary(window="1h"), agent.api.exposition()
    verdicts = {name: sum(row["verdict"] == name for row in rows) for name in ("met", "missed")}
    tokens = sum(row["output_tokens"] for row in rows)
    assert summary["requests"] == len(rows)
    assert {name: summary[name] for name in verdicts} == verdicts
    assert summary["attainment"] == verdicts["met"] / len(rows)
    assert summary["output_tokens_per_s"] * summary["covered_s"] == pytest.approx(tokens)
    steps = get(agent, "/api/v1/timeseries?window=1h&step=1m").json()["items"]
    assert sum(step["requests"] for step in steps) == len(rows)
    assert total(page, "llm_requests_total") == len(rows)
    assert total(page, "llm_agent_spans_total", outcome="stored") == len(rows)
    assert total(page, "llm_output_tokens_total") == tokens
    for verdict, count in verdicts.items():
        assert total(page, "llm_slo_requests_total", verdict=verdict) == count


def test_several_engines_are_distinguished_by_their_service_names(tmp_path: Path) -> None:
    ports = AgentPorts.free()
    with (
        Simulator(tmp_path, grpc=ports.grpc, service="chat-0") as one,
        Simulator(tmp_path, grpc=ports.grpc, service="chat-1", rate=0.5) as other,
        AgentProcess.with_settings(tmp_path, ports, _two_engines(one, other)) as agent,
    ):
        rows_in(agent, 10, engine="chat-0")
        rows_in(agent, 10, engine="chat-1")
        assert SpanSender(ports.grpc).export([request_span("of no engine")])
        assert agent.api.request("of no engine")["engine"] is None
        # An engine that has ended has sent its last span, and the agent has stored that span.
        one.process.stop()
        other.process.stop()
        rows = agent.api.requests(limit="1000")
        counted = {
            name: agent.api.summary(window="1h", engine=name)["requests"]
            for name in ("chat-0", "chat-1")
        }
        long = agent.api.summary(window="1h", objective="long")["requests"]
    for name, count in counted.items():
        assert count == sum(row["engine"] == row["service_name"] == name for row in rows)
    assert sum(counted.values()) == len(rows) - 1
    assert {row["agent"] for row in rows} == {"agent-7"}
    assert long == sum(row["input_tokens"] >= 600 for row in rows)
    assert 0 < long < len(rows)


def _two_engines(one: Simulator, other: Simulator) -> dict[str, Any]:
    return {
        "name": "agent-7",
        "engines": [_engine("chat-0", one.url), _engine("chat-1", other.url)],
        "objectives": [
            {"name": "all", "ttft_ms": 1000},
            {"name": "long", "ttft_ms": 1000, "match": {"min_input_tokens": 600}},
        ],
    }


# Stopping


def test_requests_of_a_sender_whose_clock_is_ahead_end_at_their_receipt(tmp_path: Path) -> None:
    ports, lead_s = AgentPorts.free(), 30
    spans = [request_span(f"ahead-{n}") for n in range(20)]
    for span in spans:
        span.start_time_unix_nano += lead_s * 10**9
        span.end_time_unix_nano += lead_s * 10**9
    silent = f"http://127.0.0.1:{free_port()}"
    with AgentProcess.without_file(tmp_path, ports, silent) as agent:
        assert SpanSender(ports.grpc).export(spans)
        stored_at = datetime.now(UTC)
        rows = agent.api.requests(limit="100")
        assert agent.api.summary(window="10s")["requests"] == len(rows) == 20
        page = agent.api.exposition()
    assert all(datetime.fromisoformat(row["ended_at"]) <= stored_at for row in rows)
    assert all(lead_s - 5 < row["clock_skew_s"] <= lead_s for row in rows)
    ahead = total(page, "llm_agent_values_dropped_total", field="started_at", reason="clock_ahead")
    assert ahead == 20


@contextmanager
def sending(sender: SpanSender) -> Iterator[None]:
    """Sends batches of spans, one after another, inside the block."""
    done = Event()

    def send() -> None:
        number = 0
        while not done.is_set():
            sender.export([request_span(f"{number}-{n}") for n in range(20)])
            number += 1

    thread = Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_a_stop_ends_with_success_and_loses_no_acknowledged_span(tmp_path: Path) -> None:
    ports = AgentPorts.free()
    agent = AgentProcess.without_file(tmp_path, ports, f"http://127.0.0.1:{free_port()}")
    agent.start()
    sender = SpanSender(ports.grpc)
    with sending(sender):
        eventually(lambda: len(sender.acknowledged) > 200, within_s=WITHIN_S, what="acknowledging")
        agent.stop()
        # Sent to a stopped agent, and so not acknowledged.
        eventually(lambda: sender.sent > sender.acknowledged, within_s=WITHIN_S, what="a refusal")
    # The file alone has every row, and no write-ahead log stays beside it.
    log = tmp_path / "goodput.db-wal"
    assert not log.exists() or log.stat().st_size == 0
    copy = shutil.copy(tmp_path / "goodput.db", tmp_path / "copied.db")
    with closing(sqlite3.connect(copy)) as database:
        stored = {trace_id for (trace_id,) in database.execute("SELECT trace_id FROM requests")}
    assert sender.acknowledged <= stored
    assert "Traceback" not in agent.log()
