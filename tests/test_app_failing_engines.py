"""The running agent's proxy before two engines of which one fails."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.waiting import eventually
from tests.simulated import WITHIN_S
from tests.sources.engines.wire import EngineServer

pytestmark = pytest.mark.slow

METRICS = (Path(__file__).parent / "sources/engines/pages/vllm-0.32.0.txt").read_bytes()
# No request runs: a static page with work would be a hang.
METRICS = METRICS.replace(b"num_requests_running", b"num_requests_away")
MODELS = b'{"object": "list", "data": [{"id": "m"}]}'
CHAT = "/v1/chat/completions"
CLOSE = ("Connection: close",)
ANSWER = json.dumps({"id": "x", "choices": [{"finish_reason": "stop", "message": {}}]}).encode()


def engine() -> EngineServer:
    """An engine that answers; `/metrics` goes on when its generation or its health fails."""
    server = EngineServer()
    server.answers("/metrics", METRICS, headers=CLOSE)
    server.answers("/v1/models", MODELS, headers=CLOSE)
    repair(server)
    return server


def generates(server: EngineServer, status: int) -> None:
    """Generation answers with this status."""
    server.answers(CHAT, ANSWER, status=status, headers=CLOSE)


def is_healthy(server: EngineServer, status: int) -> None:
    """The health check answers with this status."""
    server.answers("/health", b"", status=status, headers=CLOSE)


def repair(server: EngineServer) -> None:
    generates(server, 200)
    is_healthy(server, 200)


def got(server: EngineServer) -> int:
    """How many requests it read."""
    return len(server.posted)


@dataclass
class Pair:
    """Engines `bad` and `good` behind a running agent's proxy."""

    agent: AgentProcess
    url: str
    bad: EngineServer
    good: EngineServer

    def ask(self, times: int) -> Counter[int]:
        """Send requests one after the other; how many had which status."""
        return Counter(self._ask() for _ in range(times))

    def _ask(self) -> int:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        return requests.post(self.url + CHAT, json=body, timeout=WITHIN_S).status_code

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
    port = free_port()
    with ExitStack() as stack:
        bad, good = (stack.enter_context(engine()) for _ in range(2))
        settings = {
            "engines": [
                {"name": name, "url": each.url, "scrape_interval": "0.5s"}
                for name, each in (("bad", bad), ("good", good))
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
    repair(running.bad)
    before = got(running.bad), got(running.good)

    def both_answer() -> bool:
        answers, now = running.ask(2), (got(running.bad), got(running.good))
        return answers == {200: 2} and now[0] > before[0] and now[1] > before[1]

    eventually(both_answer, within_s=WITHIN_S, what="answers of both engines")
    rotation = partial(running.metric, "llm_proxy_engine_in_rotation", engine="bad")
    eventually(lambda: rotation() == 1, within_s=WITHIN_S, what="both in the rotation")
    return running


def test_an_engine_that_answers_500_is_out_until_it_is_repaired(pair: Pair) -> None:
    retried = pair.metric("llm_proxy_requests_retried_total")
    generates(pair.bad, 500)
    before = got(pair.bad)
    answers = pair.ask(60)
    assert answers[500] == 3
    assert answers[200] == 57
    # Probes that fail are answered by the other engine.
    eventually(
        lambda: (
            pair.metric("llm_proxy_requests_retried_total") - retried == got(pair.bad) - before - 3
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

    generates(pair.bad, 200)
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
    before = got(pair.bad)
    assert pair.ask(10) == {200: 10}
    assert got(pair.bad) > before


def test_an_engine_whose_health_check_fails_gets_no_request_at_all(pair: Pair) -> None:
    is_healthy(pair.bad, 503)
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
        before = got(pair.bad)
        return pair.ask(10) == {200: 10} and got(pair.bad) == before

    eventually(gets_none, within_s=WITHIN_S, what="requests for the other engine alone")
