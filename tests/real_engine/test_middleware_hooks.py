"""A vLLM with the middleware, whose hooks fail and whose agent dies.

The flag and the plugin both add the middleware.
"""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.engine_server import MODEL
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import (
    ANSWER_WITHIN_S,
    Vllm,
    plugin_environment,
    switched_environment,
)
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(900)

ENGINE = "watched-0"
LOGGER = Path(__file__).with_name("faulty_middleware.py")
FLAG = ("--middleware", "goodput_agent_vllm.middleware.GoodputMiddleware")
ROWS_WITHIN_S = 60.0
# As in faulty_middleware.py, which only vLLM's environment can import.
HOOKS = (
    *("Front.serving", "Front.begin", "Front.opened", "Front.ended", "Front._take_figures"),
    *("WatchedRequest.__init__", "WatchedRequest._received", "WatchedRequest._sent"),
    *("WatchedRequest._end", "watched_request.kernel_wait_s", "HeldFigures.take"),
    *("HeldFigures.hold", "front.record_bytes", "Reporter.add"),
)
# Its errors are those of the stat logger.
NOT_LOGGED = ("Front._take_figures",)
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
FAILED = "a request could not be measured"
OFF = "requests are measured no more"


@dataclass(frozen=True, slots=True)
class Watched:
    """The engine, its agent, and the file that says which hook fails."""

    engine: Vllm
    agent: AgentProcess
    fault: Path

    def ask(self, request_id: str, **body: Any) -> bytes:
        """Send a completion on a connection of its own; return the response's body."""
        response = requests.post(
            f"{self.engine.url}/v1/completions",
            json={"model": MODEL, "prompt": "abc", "max_tokens": 8, "ignore_eos": True, **body},
            headers={"X-Request-Id": request_id, "Connection": "close"},
            timeout=ANSWER_WITHIN_S,
        )
        assert response.status_code == 200
        return response.content

    def rows_of(self, prefix: str, count: int) -> list[dict[str, Any]]:
        """The rows of requests whose ids begin so, once each of `count` has one."""

        def found() -> list[dict[str, Any]]:
            rows = self.agent.api.requests()
            named = [row for row in rows if row["request_id"].startswith(prefix)]
            return named if len({row["request_id"] for row in named}) >= count else []

        return eventually(found, within_s=ROWS_WITHIN_S, what=f"{count} rows of {prefix}")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    path, fault = folder / "vllm.sock", folder / "fault"
    environment = plugin_environment(folder / "plugin", path)
    environment = switched_environment(
        folder / "switched", environment, LOGGER, "GoodputStatLogger"
    )
    engine = Vllm(
        folder,
        port=free_port(),
        spans=None,
        extra=FLAG,
        environment={**environment, "GOODPUT_TEST_FAULT": str(fault)},
    )
    settings = {
        "engines": [{"name": ENGINE, "url": engine.url, "plugin_socket": str(path)}],
        "nvml": {"enabled": False},
    }
    with AgentProcess.with_settings(folder, AgentPorts.free(), settings) as agent, engine:
        yield Watched(engine, agent, fault)


def is_whole(body: bytes, *, streamed: bool) -> bool:
    if not streamed:
        return bool(json.loads(body)["usage"]["completion_tokens"] == 8)
    assert body.endswith(b"data: [DONE]\n\n")
    return b'"completion_tokens":8' in body


def test_each_request_is_reported_once_though_the_middleware_was_added_twice(
    watched: Watched,
) -> None:
    numbers = range(16)
    with ThreadPoolExecutor(4) as pool:
        bodies = [*pool.map(lambda n: watched.ask(f"server-{n}", **STREAM), numbers)]
    assert all(is_whole(body, streamed=True) for body in bodies)
    rows = watched.rows_of("server-", len(numbers))
    assert Counter(row["request_id"] for row in rows) == {f"server-{n}": 1 for n in numbers}
    assert {(row["vantage"], row["output_tokens"]) for row in rows} == {("joined", 8)}


def test_an_agent_that_dies_and_comes_back_costs_no_response(watched: Watched) -> None:
    numbers = range(12)
    with ThreadPoolExecutor(len(numbers)) as pool:
        asked = [pool.submit(watched.ask, f"killed-{n}", max_tokens=8, **STREAM) for n in numbers]
        asked[0].result()
        watched.agent.kill()
        bodies = [each.result() for each in asked]
    # Nothing listens.
    bodies += [watched.ask(f"alone-{n}", **STREAM) for n in range(3)]
    assert all(is_whole(body, streamed=True) for body in bodies)
    watched.agent.start()
    assert is_whole(watched.ask("back"), streamed=False)
    # What a front sent last may be lost with an agent that is killed, but nothing is there twice.
    (row,) = watched.rows_of("back", 1)
    assert row["vantage"] == "joined"
    rows = watched.rows_of("alone-", 3)
    assert Counter(row["request_id"] for row in rows) == {f"alone-{n}": 1 for n in range(3)}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises_costs_no_response(watched: Watched, hook: str) -> None:
    before = watched.engine.log.read_text().count(FAILED)
    watched.fault.write_text(hook)
    try:
        for streamed in (False, True):
            body = watched.ask(f"fault-{hook}-{streamed}", **(STREAM if streamed else {}))
            assert is_whole(body, streamed=streamed)
        if hook not in NOT_LOGGED:
            # The fault was there; the report follows the response.
            eventually(
                lambda: watched.engine.log.read_text().count(FAILED) > before,
                within_s=ROWS_WITHIN_S,
                what=f"the fault of {hook}",
            )
    finally:
        watched.fault.unlink()


def test_after_ten_errors_a_front_measures_no_more_and_says_so_once(watched: Watched) -> None:
    """The last test of its engine."""
    watched.fault.write_text("WatchedRequest._sent")
    with ThreadPoolExecutor(4) as pool:
        bodies = [*pool.map(lambda n: watched.ask(f"off-{n}", **STREAM), range(60))]
    watched.fault.unlink()
    assert all(is_whole(body, streamed=True) for body in bodies)
    assert watched.engine.log.read_text().count(OFF) == 1
