"""What the agent knows of requests to a vLLM with the plugin: no spans, no proxy, no option.

The plugin's stat logger adds the middleware by itself, to each of two API servers.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import requests

from agent.pipeline.ended_requests import OWN_ROW_AFTER_S
from tests.real_engine.front_requests import (
    ANSWER_WITHIN_S,
    CHAT,
    KEY,
    ROW_WITHIN_S,
    STREAMED,
    WHOLE,
    Row,
    WatchedFront,
)
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.engine_server import MODEL
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import Vllm, plugin_environment
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(900)

# `run --engine` names an engine after its place in the list.
ENGINE = "engine-0"
STREAMS = 200


@dataclass(frozen=True, slots=True)
class WatchedVllm(WatchedFront):
    """A vLLM with the plugin, and its agent."""

    engine: Vllm

    def metric(self, name: str) -> float | None:
        """A metric of the engine; None while it is absent."""
        try:
            return total(self.api.exposition(), name, engine=ENGINE)
        except KeyError:
            return None


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedVllm]:
    """They find each other without a setting; the agent is there first."""
    folder = tmp_path_factory.mktemp("watched")
    # For a user who may not make a folder in /run.
    place = {"XDG_RUNTIME_DIR": str(folder)}
    plugin = plugin_environment(folder / "plugin", Path()) | {"GOODPUT_AGENT_SOCKET": ""}
    engine = Vllm(
        folder,
        port=free_port(),
        spans=None,
        extra=["--api-key", KEY, "--max-model-len", "2048"],
        environment=plugin | place | {"VLLM_ENABLE_RESPONSES_API_STORE": "1"},
        api_servers=2,
    )
    with AgentProcess.without_file(
        folder, AgentPorts.free(), engine.url, place | {"GOODPUT_AGENT_SOCKET": "auto"}
    ) as agent:
        before = WatchedVllm(engine.url, ENGINE, agent, engine)
        assert before.metric("llm_engine_plugin_up") is None
        with engine:
            yield before


@pytest.mark.parametrize(
    ("path", "body", "choices", "input_tokens", "output_tokens"),
    [
        ("/v1/chat/completions", {**CHAT, **STREAMED}, 1, 10, 12),
        ("/v1/chat/completions", {**CHAT, **WHOLE}, 1, 10, 12),
        ("/v1/chat/completions", {**CHAT, **STREAMED, "n": 2}, 2, 10, 24),
        ("/v1/completions", {"prompt": "abc", **STREAMED}, 1, 2, 12),
        ("/v1/completions", {"prompt": ["abc", "bacade"], **WHOLE}, 2, 5, 24),
        ("/v1/messages", {**CHAT, **STREAMED}, 1, 10, 12),
        ("/v1/messages", {**CHAT, **WHOLE}, 1, 10, 12),
    ],
)
def test_a_request_has_both_views_without_spans_and_without_a_proxy(
    watched: WatchedVllm,
    path: str,
    body: dict[str, Any],
    choices: int,
    input_tokens: int,
    output_tokens: int,
) -> None:
    row = watched.row_of(path, body, choices, input_tokens, output_tokens)
    assert row["engine_request_id"].startswith(row["response_id"])
    assert (row["max_gap_s"] is not None) == (choices == 1 and "stream" in body)


@pytest.mark.parametrize(
    ("name", "path", "body", "headers", "http_status"),
    [
        ("key", "/v1/chat/completions", CHAT, {"Authorization": "Bearer no"}, 401),
        ("tokens", "/v1/chat/completions", {**CHAT, "max_tokens": -4}, {}, 400),
        ("length", "/v1/completions", {"prompt": "a b " * 4000}, {}, 400),
        ("model", "/v1/chat/completions", {**CHAT, "model": "none"}, {}, 404),
    ],
)
def test_a_request_that_vllm_refuses_is_a_row(
    watched: WatchedVllm,
    name: str,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
    http_status: int,
) -> None:
    watched.refused_row(name, path, body, headers, http_status)


def test_a_beam_search_is_one_request_though_the_engine_gets_many(watched: WatchedVllm) -> None:
    body = {"prompt": "abc", "use_beam_search": True, "n": 2, "max_tokens": 4, "ignore_eos": True}
    assert watched.ask("/v1/completions", "beams", body).json()["usage"]["completion_tokens"] == 8
    row = watched.row("beams")
    assert (row["vantage"], row["status"], row["output_tokens"]) == ("proxy", "ok", 8)


def test_a_response_in_the_background_is_one_row_with_the_engines_figures(
    watched: WatchedVllm,
) -> None:
    body = {"input": "hello there", "background": True, "store": True, "max_output_tokens": 12}
    queued = watched.ask("/v1/responses", "background", body).json()
    assert queued["status"] == "queued"

    def rows() -> list[Row]:
        return [row for row in watched.api.requests() if queued["id"] in str(row["request_id"])]

    # A span would come before it has a row of its own.
    within_s = OWN_ROW_AFTER_S + ROW_WITHIN_S
    (row,) = eventually(rows, within_s=within_s, what="a row of the response")
    # What its client waited for is another request, which asks for the response.
    assert (row["vantage"], row["status"], row["output_tokens"]) == ("engine", "ok", 12)
    assert row["queue_s"] + row["prefill_s"] + row["decode_s"] <= row["e2e_s"]


def test_a_request_whose_client_leaves_before_the_head_is_cancelled(watched: WatchedVllm) -> None:
    row = watched.left_row(max_tokens=1500)
    assert row["engine_status"] == "cancelled"
    assert row["output_tokens"] < 1500


def test_a_stream_that_its_client_leaves_is_cancelled(watched: WatchedVllm) -> None:
    row = watched.left_stream_row()
    assert row["first_byte_s"] <= row["ttft_s"] <= row["e2e_s"]


def test_an_agent_and_a_vllm_on_one_machine_find_each_other_without_a_setting(
    watched: WatchedVllm,
) -> None:
    watched.ask("/v1/chat/completions", "found", {**CHAT, **WHOLE}).close()
    assert watched.row("found")["engine"] == ENGINE
    assert watched.metric("llm_engine_plugin_up") == 1
    # Before vLLM listened, its plugin had no records.
    assert "is of no known engine" not in watched.agent.log()
    eventually(
        lambda: watched.metric("llm_engine_open_requests") == 0,
        within_s=ROW_WITHIN_S,
        what="its file",
    )


def test_other_routes_are_counted(watched: WatchedVllm) -> None:
    url, headers = watched.engine.url, {"Authorization": f"Bearer {KEY}"}
    body = {"model": MODEL, "prompt": "abc"}
    for _ in range(3):
        requests.post(f"{url}/tokenize", json=body, headers=headers, timeout=ANSWER_WITHIN_S)
    requests.get(f"{url}/nowhere", headers=headers, timeout=ANSWER_WITHIN_S)

    def counted() -> bool:
        page, name = watched.api.exposition(), "llm_engine_responses_total"
        of = {"engine": ENGINE}
        return (
            total(page, name, route="/tokenize", status="2xx", **of) == 3
            and total(page, name, route="other", status="4xx", **of) == 1
        )

    assert eventually(counted, within_s=ROW_WITHIN_S, what="the routes")


def test_of_200_streams_at_once_each_has_its_text_and_a_row_whichever_server_took_it(
    watched: WatchedVllm,
) -> None:
    body = {"prompt": "abc", "temperature": 0, **STREAMED}

    def stream(number: int) -> str:
        return text_of(watched.ask("/v1/completions", f"many-{number}", body))

    alone = stream(200)
    with ThreadPoolExecutor(STREAMS) as pool:
        assert {*pool.map(stream, range(STREAMS))} == {alone}

    def rows() -> list[Row]:
        found = [row for row in watched.api.requests() if row["request_id"].startswith("many-")]
        return found if len(found) > STREAMS else []

    found = eventually(rows, within_s=ROW_WITHIN_S, what="a row of each stream")
    assert {row["request_id"] for row in found} == {f"many-{n}" for n in range(STREAMS + 1)}
    assert len(found) == STREAMS + 1
    assert {(row["vantage"], row["output_tokens"]) for row in found} == {("joined", 12)}
    assert watched.metric("llm_engine_plugin_dropped_total") in (0, None)


def text_of(response: requests.Response) -> str:
    *events, done = [line for line in response.iter_lines() if line]
    assert done == b"data: [DONE]"
    parsed = [json.loads(event.removeprefix(b"data: ")) for event in events]
    return "".join(choice["text"] for event in parsed for choice in event["choices"])


def test_open_requests_are_known_and_fail_when_the_front_dies(watched: WatchedVllm) -> None:
    """The last test of its engine."""
    body = {**CHAT, **STREAMED, "max_tokens": 1900}
    eventually(watched.is_known, within_s=ROW_WITHIN_S, what="the model")
    streams = [watched.ask("/v1/chat/completions", f"died-{number}", body) for number in range(3)]
    # An iterator that is thrown away closes its connection.
    lines = [stream.iter_lines() for stream in streams]
    for each in lines:
        next(each)
    with watched.engine.standing_still():
        eventually(
            lambda: watched.metric("llm_engine_open_requests") == 3,
            within_s=ROW_WITHIN_S,
            what="three open requests",
        )
        died_at = time.time()
        for pid in watched.engine.api_server_pids:
            os.kill(pid, signal.SIGKILL)
    for number in range(3):
        row = watched.row(f"died-{number}")
        assert (row["status"], row["error"], row["verdict"]) == ("error", "front_died", "missed")
        assert row["tenant"].startswith("key-")
        assert row["model"] == MODEL
        ended_at = datetime.fromisoformat(row["ended_at"]).timestamp()
        assert died_at - 60 < ended_at <= died_at + 1
    for stream in streams:
        stream.close()
