"""What the agent knows of requests to an SGLang with the plugin: no spans, no proxy, no flag."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import requests

from tests.real_engine.front_requests import (
    ANSWER_WITHIN_S,
    CHAT,
    KEY,
    ROW_WITHIN_S,
    STREAMED,
    WHOLE,
    WatchedFront,
)
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.engine_server import MODEL
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.sglang import Sglang
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(Sglang.start_within_s + 120)

ENGINE = "sglang-0"


@dataclass(frozen=True, slots=True)
class WatchedSglang(WatchedFront):
    """An SGLang with the plugin, and its agent."""

    engine: Sglang

    def counted(self, route: str) -> float:
        """How many responses of a route the plugin counted."""
        page = self.api.exposition()
        return total(page, "llm_engine_responses_total", engine=ENGINE, route=route)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedSglang]:
    folder = tmp_path_factory.mktemp("sglang")
    socket = folder / "sglang.sock"
    engine = Sglang(
        folder,
        port=free_port(),
        plugin_socket=socket,
        extra=["--api-key", KEY, "--enable-metrics"],
    )
    settings = {
        "engines": [{"name": ENGINE, "url": engine.url, "plugin_socket": str(socket)}],
        "objectives": [{"name": "chat", "ttft_ms": 60_000, "tpot_ms": 10_000}],
        "nvml": {"enabled": False},
    }
    with AgentProcess.with_settings(folder, AgentPorts.free(), settings) as agent, engine:
        yield WatchedSglang(engine.url, ENGINE, agent, engine)


@pytest.mark.parametrize(
    ("path", "body", "choices", "input_tokens", "output_tokens"),
    [
        ("/v1/chat/completions", {**CHAT, **STREAMED}, 1, 10, 12),
        ("/v1/chat/completions", {**CHAT, **WHOLE}, 1, 10, 12),
        ("/v1/chat/completions", {**CHAT, **STREAMED, "n": 2}, 2, 10, 24),
        ("/v1/chat/completions", {**CHAT, **WHOLE, "n": 2}, 2, 10, 24),
        ("/v1/completions", {"prompt": "abc", **STREAMED}, 1, 2, 12),
        ("/v1/completions", {"prompt": ["abc", "bacade"], **STREAMED}, 2, 5, 24),
        ("/v1/completions", {"prompt": ["abc", "bacade"], **WHOLE, "n": 2}, 4, 5, 48),
        ("/v1/messages", {**CHAT, "stream": True, "max_tokens": 12}, 1, 10, 12),
        ("/v1/messages", {**CHAT, "max_tokens": 12}, 1, 10, 12),
        ("/v1/responses", {"input": "abc", "stream": True, "max_output_tokens": 12}, 1, 5, 10),
        ("/v1/responses", {"input": "abc", "max_output_tokens": 12}, 1, 5, 10),
    ],
)
def test_a_request_has_both_views_without_spans_and_without_a_proxy(
    watched: WatchedSglang,
    path: str,
    body: dict[str, Any],
    choices: int,
    input_tokens: int,
    output_tokens: int,
) -> None:
    row = watched.row_of(path, body, choices, input_tokens, output_tokens)
    if choices == 1:
        assert 0 < row["engine_ttft_s"] <= row["engine_e2e_s"]
    assert (row["tpot_s"] is not None) == (choices == 1 and "stream" in body)


@pytest.mark.parametrize(
    ("name", "path", "body", "headers", "http_status"),
    [
        ("key", "/v1/chat/completions", CHAT, {"Authorization": "Bearer no"}, 401),
        ("tokens", "/v1/chat/completions", {**CHAT, "max_tokens": -4}, {}, 400),
        ("length", "/v1/completions", {"prompt": "a b " * 4000, "stream": True}, {}, 400),
    ],
)
def test_a_request_that_sglang_refuses_is_a_row(
    watched: WatchedSglang,
    name: str,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
    http_status: int,
) -> None:
    watched.refused_row(name, path, body, headers, http_status)


def test_a_request_whose_client_leaves_before_the_head_is_cancelled(watched: WatchedSglang) -> None:
    # SGLang looks for the client every 4 s alone, so it may have computed all.
    assert watched.left_row(max_tokens=200)["output_tokens"] <= 200


def test_a_stream_that_its_client_leaves_is_cancelled(watched: WatchedSglang) -> None:
    row = watched.left_stream_row()
    assert (row["vantage"], row["engine_status"]) == ("joined", "cancelled")


def test_other_routes_are_counted_but_not_those_of_the_warm_up(watched: WatchedSglang) -> None:
    url, headers = watched.engine.url, {"Authorization": f"Bearer {KEY}"}
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 2}}
    for _ in range(3):
        requests.post(f"{url}/generate", json=body, headers=headers, timeout=ANSWER_WITHIN_S)
    eventually(lambda: watched.counted("/generate") >= 3, within_s=ROW_WITHIN_S, what="the routes")
    assert watched.counted("/generate") == 3


def test_the_agent_reads_the_metrics_of_a_running_sglang(watched: WatchedSglang) -> None:
    counts = ("output_tokens_total", "requests_finished_total", "request_duration_seconds_count")

    def unread() -> list[str]:
        page = watched.api.exposition()
        names = [f"llm_engine_{name}" for name in counts]
        return [name for name in names if not total(page, name, engine=ENGINE, model=MODEL)]

    eventually(lambda: not unread(), within_s=ROW_WITHIN_S, what="SGLang's own counts")
    assert total(watched.api.exposition(), "llm_engine_up", engine=ENGINE) == 1


def test_open_requests_fail_when_the_scheduler_dies(watched: WatchedSglang) -> None:
    """The last test of its engine, which ends itself then."""
    body = {**CHAT, **STREAMED, "max_tokens": 1900}
    eventually(watched.is_known, within_s=ROW_WITHIN_S, what="the model")
    streams = [watched.ask("/v1/chat/completions", f"died-{number}", body) for number in range(2)]
    # An iterator that is thrown away closes its connection.
    lines = [stream.iter_lines() for stream in streams]
    for each in lines:
        next(each)
    watched.engine.scheduler.kill()
    for number in range(2):
        row = watched.row(f"died-{number}")
        assert (row["status"], row["error"], row["verdict"]) == ("error", "front_died", "missed")
        assert row["tenant"].startswith("key-")
        assert row["model"] == MODEL
    for stream in streams:
        stream.close()
