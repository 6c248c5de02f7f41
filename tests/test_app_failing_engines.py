"""The running agent's proxy before two engines of which one fails."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import requests

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.waiting import eventually
from tests.simulated import WITHIN_S

pytestmark = pytest.mark.slow

METRICS = (Path(__file__).parent / "sources/engines/pages/vllm-0.32.0.txt").read_bytes()
# No request runs: a static page with work would be a hang.
METRICS = METRICS.replace(b"num_requests_running", b"num_requests_away")
MODELS = b'{"object": "list", "data": [{"id": "m"}]}'
ANSWER = json.dumps({"id": "x", "choices": [{"finish_reason": "stop", "message": {}}]}).encode()


@dataclass
class BrokenEngine:
    """An engine whose generation answers with `status`, and `/health` with `health`.

    `/metrics` goes on all the same.
    """

    status: int = 200
    health: int = 200
    got: int = 0

    def handler(self) -> type[BaseHTTPRequestHandler]:
        """The class of its HTTP server."""
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                """Stay silent."""

            def do_GET(self) -> None:
                health = self.path == "/health"
                body = METRICS if self.path == "/metrics" else MODELS
                self.answer(engine.health if health else 200, b"" if health else body)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                engine.got += 1
                self.answer(engine.status, ANSWER)

            def answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        return Handler


@contextmanager
def served(engine: BrokenEngine) -> Iterator[str]:
    """Serve an engine; the URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), engine.handler()) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@dataclass
class Pair:
    """Engines `bad` and `good` behind a running agent's proxy."""

    agent: AgentProcess
    url: str
    bad: BrokenEngine
    good: BrokenEngine

    def ask(self, times: int) -> Counter[int]:
        """Send requests one after the other; how many had which status."""
        return Counter(self._ask() for _ in range(times))

    def _ask(self) -> int:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        url = f"{self.url}/v1/chat/completions"
        return requests.post(url, json=body, timeout=WITHIN_S).status_code

    def events(self, kind: str, reason: str) -> list[dict[str, Any]]:
        """The evidence of the stored events of a kind and reason, with their engine."""
        return [
            {"engine": each["engine"], **each["evidence"]}
            for each in self.agent.api.events(window="1h")
            if each["kind"] == kind and each["evidence"]["reason"] == reason
        ]

    def metric(self, name: str, **labels: str) -> float:
        """A value that the agent publishes."""
        return total(self.agent.api.exposition(), name, **labels)

    def shows(self, engine: str) -> str | None:
        """Why the page shows an engine as out of the rotation."""
        found = requests.get(f"{self.agent.url}/api/v1/engines", timeout=WITHIN_S).json()
        (why,) = [each["ejected"] for each in found["items"] if each["name"] == engine]
        return None if why is None else str(why)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    bad, good, port = BrokenEngine(), BrokenEngine(), free_port()
    with ExitStack() as stack:
        urls = {
            name: stack.enter_context(served(engine))
            for name, engine in (("bad", bad), ("good", good))
        }
        settings = {
            "engines": [
                {"name": name, "url": url, "scrape_interval": "0.5s"} for name, url in urls.items()
            ],
            "proxy": {
                "listen": f"127.0.0.1:{port}",
                "join_wait": "0.1s",
                "outlier_detection": {"ejection": "1s", "max_ejection": "2s"},
            },
            "nvml": {"enabled": False},
        }
        agent = AgentProcess.with_settings(
            tmp_path_factory.mktemp("pair"), AgentPorts.free(), settings
        )
        stack.enter_context(agent)
        yield Pair(agent, f"http://127.0.0.1:{port}", bad, good)


@pytest.fixture
def pair(running: Pair) -> Pair:
    """Both engines answer, and both are asked."""
    running.bad.status = running.bad.health = 200
    before = running.bad.got, running.good.got

    def both_answer() -> bool:
        answers, got = running.ask(2), (running.bad.got, running.good.got)
        return answers == {200: 2} and got[0] > before[0] and got[1] > before[1]

    eventually(both_answer, within_s=WITHIN_S, what="answers of both engines")
    rotation = partial(running.metric, "llm_proxy_engine_in_rotation", engine="bad")
    eventually(lambda: rotation() == 1, within_s=WITHIN_S, what="both in the rotation")
    return running


def test_an_engine_that_answers_500_is_out_until_it_is_repaired(pair: Pair) -> None:
    retried = pair.metric("llm_proxy_requests_retried_total")
    pair.bad.status, before = 500, pair.bad.got
    answers = pair.ask(60)
    assert answers[500] == 3
    assert answers[200] == 57
    # Probes that fail are answered by the other engine.
    eventually(
        lambda: (
            pair.metric("llm_proxy_requests_retried_total") - retried == pair.bad.got - before - 3
        ),
        within_s=WITHIN_S,
        what="the count of retries",
    )
    left = eventually(
        lambda: pair.events("ENGINE_EJECTED", "error"), within_s=WITHIN_S, what="its ejection"
    )
    assert [(each["engine"], each["detail"]) for each in left] == [("bad", "500")]
    eventually(
        lambda: pair.shows("bad") == "error 500", within_s=WITHIN_S, what="the page's reason"
    )
    assert pair.shows("good") is None
    assert pair.metric("llm_proxy_engine_ejections_total", engine="bad", reason="error") >= 1

    pair.bad.status = 200
    eventually(
        lambda: pair.ask(5) and pair.events("ENGINE_RETURNED", "error"),
        within_s=WITHIN_S,
        what="the event of its return",
    )
    eventually(
        lambda: pair.metric("llm_proxy_engine_in_rotation", engine="bad") == 1,
        within_s=WITHIN_S,
        what="its place in the rotation",
    )
    eventually(lambda: pair.shows("bad") is None, within_s=WITHIN_S, what="the page without it")
    before = pair.bad.got
    assert pair.ask(10) == {200: 10}
    assert pair.bad.got > before


def test_an_engine_whose_health_check_fails_gets_no_request_at_all(pair: Pair) -> None:
    pair.bad.health = 503
    eventually(
        lambda: pair.metric("llm_proxy_engine_in_rotation", engine="bad") == 0,
        within_s=WITHIN_S,
        what="the end of its rotation",
    )
    eventually(
        lambda: pair.shows("bad") is not None, within_s=WITHIN_S, what="the page's word for it"
    )

    def gets_none() -> bool:
        """Whether a worker knows: it learns within a second."""
        before = pair.bad.got
        return pair.ask(10) == {200: 10} and pair.bad.got == before

    eventually(gets_none, within_s=WITHIN_S, what="requests for the other engine alone")
