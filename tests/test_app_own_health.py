"""The running agent about itself: what it publishes and says while its database is locked."""

import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Event, Thread

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from agent.catalog import metrics as m
from agent.catalog import own_health as own
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.span_sender import SpanSender, request_span
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.slow

WITHIN_S = 120.0
# What this agent has of the metrics that may be absent.
THERE = {m.SLO_LIMIT, m.FORWARD_QUEUE, own.STAGE_LAG, own.QUEUE_FILL, own.DATABASE_SIZE}


class DoubtingAgent(AgentProcess):
    """An agent that is soon in doubt about itself."""

    module = "tests.real_parts.agent_in_doubt"


@dataclass
class Doubting:
    """The agent, its sender, its database, and what it published before any request."""

    agent: AgentProcess
    sender: SpanSender
    file: Path
    first: str

    def value(self, metric: str, **labels: str) -> float:
        return total(self.agent.api.exposition(), metric, **labels)

    def stores(self, request_id: str) -> None:
        """Send a request until it is stored: few others may wait at a time."""
        eventually(
            lambda: self.sender.export([request_span(request_id)]),
            within_s=WITHIN_S,
            what="an acknowledged span",
        )

    def parts(self) -> dict[str, str]:
        found: dict[str, str] = requests.get(f"{self.agent.url}/readyz", timeout=30).json()["parts"]
        return found


@pytest.fixture(scope="module")
def doubting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doubting]:
    """An agent that forwards to a host which takes connections and never answers."""
    folder, ports = tmp_path_factory.mktemp("doubting"), AgentPorts.free()
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        settings = {
            "engines": [{"name": "chat-0", "url": f"http://127.0.0.1:{free_port()}"}],
            "otlp": {"forward_to": f"http://127.0.0.1:{silent.getsockname()[1]}"},
        }
        with DoubtingAgent.with_settings(folder, ports, settings) as agent:
            sized = "llm_agent_database_bytes"
            eventually(lambda: sized in agent.api.exposition(), within_s=WITHIN_S, what=sized)
            first = agent.api.exposition()
            yield Doubting(agent, SpanSender(ports.grpc), folder / "goodput.db", first)


@contextmanager
def locked(doubting: Doubting) -> Iterator[None]:
    """Nobody else can write to the database, while exports of four requests keep coming."""
    over = Event()

    def send() -> None:
        while not over.is_set():
            doubting.sender.export([request_span(f"r{number}") for number in range(4)])

    sending = Thread(target=send)
    with closing(sqlite3.connect(doubting.file, timeout=30, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        sending.start()
        try:
            yield
        finally:
            database.execute("ROLLBACK")
            over.set()
            sending.join()


def test_before_any_request_the_metrics_are_those_that_are_never_absent(doubting: Doubting) -> None:
    shown = {family.name for family in text_string_to_metric_families(doubting.first)}
    always = {metric for metric in m.AGENT_METRICS if not metric.absent}
    assert {each.name for each in m.AGENT_METRICS} & shown == {each.name for each in always | THERE}
    # The files of the database do not shrink while the agent runs.
    files = [doubting.file, *doubting.file.parent.glob("goodput.db-*")]
    size = total(doubting.first, "llm_agent_database_bytes")
    assert doubting.file.stat().st_size < size <= sum(file.stat().st_size for file in files)


def test_a_stage_a_queue_and_a_job_that_wait_are_published_and_said(doubting: Doubting) -> None:
    def caught_up() -> bool:
        parts = doubting.parts()
        return parts["jobs"] == parts["queues"] == "ok" and "commit is " not in parts["stages"]

    eventually(caught_up, within_s=WITHIN_S, what="an agent without trouble")
    with locked(doubting):

        def trouble() -> bool:
            parts = doubting.parts()
            return (
                "commit is " in parts["stages"]
                and "commit is 100% full" in parts["queues"]
                and "settle requests is " in parts["jobs"]
            )

        eventually(trouble, within_s=WITHIN_S, what="/readyz with three kinds of trouble")
        eventually(
            lambda: (
                doubting.value("llm_agent_stage_lag_seconds", stage="commit") > 1
                and doubting.value("llm_agent_queue_fill_ratio", queue="commit") == 1
                and doubting.value("llm_agent_job_late_seconds", job_name="settle requests") > 1
            ),
            within_s=WITHIN_S,
            what="the same on /metrics",
        )
    job = {"job_name": "settle requests", "reason": "skipped"}
    assert doubting.value("llm_agent_job_misses_total", **job) > 0
    eventually(caught_up, within_s=WITHIN_S, what="an agent that has caught up")
    assert doubting.value("llm_agent_queue_fill_ratio", queue="commit") == 0


def test_the_newest_row_is_the_one_in_the_table(doubting: Doubting) -> None:
    doubting.stores("newest")
    with closing(sqlite3.connect(doubting.file)) as database:
        (newest,) = database.execute("SELECT max(received_at) FROM requests").fetchone()
    at = datetime.fromisoformat(f"{newest}+00:00").timestamp()
    metric = "llm_agent_newest_row_timestamp_seconds"
    assert doubting.value(metric, table="requests") == pytest.approx(at, abs=1e-3)


def test_a_destination_that_does_not_answer_is_a_stage_behind(doubting: Doubting) -> None:
    doubting.stores("forwarded")
    eventually(
        lambda: doubting.value("llm_agent_stage_lag_seconds", stage="forward") > 1,
        within_s=WITHIN_S,
        what="lag of forwarding",
    )
    assert "forward is " in doubting.parts()["stages"]
    assert 0 < doubting.value("llm_agent_queue_fill_ratio", queue="forward") < 0.01
