"""Attacks on the doors of the running agent."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import psycopg
import pytest
import requests

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.ports import free_port
from tests.real_parts.span_sender import SpanSender, request_span
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.slow

WITHIN_S = 60.0

# More than there are threads, and twice as many as there are connections.
CLIENTS = 45


@contextmanager
def asking(url: str) -> Iterator[list[requests.Response]]:
    """Many clients that query a path without end, and their responses."""
    responses: list[requests.Response] = []
    done = Event()

    def ask() -> None:
        while not done.is_set():
            responses.append(requests.get(url, timeout=WITHIN_S))

    with ThreadPoolExecutor(CLIENTS) as clients:
        asked = [clients.submit(ask) for _ in range(CLIENTS)]
        try:
            yield responses
        finally:
            done.set()
            for each in asked:
                each.result()


def test_queries_that_wait_for_a_lock_are_refused_and_keep_nobody_else_waiting(
    tmp_path: Path, postgres_url: str
) -> None:
    ports = AgentPorts.free()
    settings = {
        "engines": [{"name": "chat-0", "url": f"http://127.0.0.1:{free_port()}"}],
        "storage": {"url": postgres_url, "query_timeout": "2s"},
    }
    with (
        AgentProcess.with_settings(tmp_path, ports, settings) as agent,
        psycopg.connect(postgres_url.replace("+psycopg", "")) as database,
        asking(f"{agent.url}/api/v1/summary") as responses,
    ):
        database.execute("LOCK TABLE rollups IN ACCESS EXCLUSIVE MODE")
        before = len(responses)
        eventually(lambda: len(responses) > before + 2 * CLIENTS, within_s=WITHIN_S, what="refusal")
        # Every thread and connection of queries is waiting now.
        assert "llm_agent_info" in agent.api.exposition()
        assert SpanSender(ports.grpc).export([request_span("while queries wait")])
        refused = responses[before + CLIENTS :]
        database.rollback()
        eventually(lambda: responses[-1].ok, within_s=WITHIN_S, what="figures")
    assert {response.status_code for response in refused} == {503}
    sentences = {response.json()["detail"] for response in refused}
    assert any("storage.query_timeout" in sentence for sentence in sentences)
    assert not any("127.0.0.1" in sentence for sentence in sentences)
