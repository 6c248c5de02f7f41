"""The alert on a slow database, on a real agent that has one."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread

from agent.render.alerts import Timings
from agent.render.alerts.agent_alerts import agent_alerts
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.ports import free_port
from tests.real_parts.prometheus import Prometheus, scrape_of
from tests.real_parts.span_sender import SpanSender, request_span
from tests.real_parts.waiting import eventually

WITHIN_S = 60.0
# A window of five seconds; how long a row may wait stays the same.
FAST = Timings(speed=60, scrape_interval_s=1, evaluation_interval_s=1)
(BEHIND,) = (
    alert.expression for alert in agent_alerts(FAST) if alert.name == "LlmAgentStoreBehind"
)


@contextmanager
def one_sender(port: int) -> Iterator[None]:
    """Few spans at a time, and no more before these were taken, for as long as this lasts."""
    done = Event()

    def send() -> None:
        sender = SpanSender(port)
        while not done.is_set():
            sender.export([request_span("r") for _ in range(5)])

    thread = Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_a_locked_database_is_reported_with_the_rows_of_one_sender_alone(
    tmp_path: Path,
) -> None:
    ports = AgentPorts.free()
    # The engine itself is away: its spans are what matters.
    engine = {"name": "chat-0", "url": f"http://127.0.0.1:{free_port()}"}
    settings = {"nvml": {"enabled": False}, "engines": [engine]}
    with (
        AgentProcess.with_settings(tmp_path, ports, settings) as agent,
        Prometheus(tmp_path, scrape_of("agents", agent.url)) as prometheus,
        one_sender(ports.grpc),
        closing(sqlite3.connect(tmp_path / "goodput.db", isolation_level=None)) as other,
    ):
        stored = "sum(rate(llm_requests_total[5s])) > 0"
        eventually(lambda: prometheus.query(stored), within_s=WITHIN_S, what="stored requests")
        assert prometheus.query(BEHIND) == []
        other.execute("PRAGMA busy_timeout=30000")
        other.execute("BEGIN IMMEDIATE")
        eventually(lambda: prometheus.query(BEHIND), within_s=WITHIN_S, what="the alert")
        other.execute("ROLLBACK")
        eventually(lambda: not prometheus.query(BEHIND), within_s=WITHIN_S, what="its end")
