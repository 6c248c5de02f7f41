"""What the agent knows of requests to a vLLM with the plugin: no spans, no proxy, no option.

The plugin's stat logger adds the middleware by itself, to each of two API servers.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.real_parts.agent_process import AgentApi, AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import ANSWER_WITHIN_S, MODEL, Vllm, plugin_environment
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(900)

# `run --engine` names an engine after its place in the list.
ENGINE = "engine-0"
KEY = "sk-test"
ROW_WITHIN_S = 30.0
STREAMS = 200

Row = dict[str, Any]
CHAT = {"messages": [{"role": "user", "content": "hello there"}]}


@dataclass(frozen=True, slots=True)
class Watched:
    """An engine with the middleware, and its agent."""

    engine: Vllm
    agent: AgentProcess

    @property
    def api(self) -> AgentApi:
        """The agent's API."""
        return self.agent.api

    def ask(self, path: str, request_id: str, body: dict[str, Any], **headers: str) -> Any:
        """Send a request; return the response, whose body is not read yet."""
        sent = {"Authorization": f"Bearer {KEY}", "X-Request-Id": request_id, **headers}
        return requests.post(
            f"{self.engine.url}{path}",
            json={"model": MODEL, **body},
            headers=sent,
            stream=True,
            timeout=ANSWER_WITHIN_S,
        )

    def metric(self, name: str) -> float | None:
        """A metric of the engine; None while it is absent."""
        try:
            return total(self.api.exposition(), name, engine=ENGINE)
        except KeyError:
            return None

    def row(self, request_id: str) -> Row:
        """The one row of a request, once it is there."""

        def found() -> list[Row]:
            return [row for row in self.api.requests() if row["request_id"] == request_id]

        rows = eventually(found, within_s=ROW_WITHIN_S, what=f"a row of {request_id}")
        assert len(rows) == 1
        return rows[0]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
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
        environment=plugin | place,
        api_servers=2,
    )
    with AgentProcess.without_file(
        folder, AgentPorts.free(), engine.url, place | {"GOODPUT_AGENT_SOCKET": "auto"}
    ) as agent:
        before = Watched(engine, agent)
        assert before.metric("llm_engine_plugin_up") is None
        with engine:
            yield before


STREAMED = {"stream": True, "ignore_eos": True, "max_tokens": 12}
WHOLE = {"ignore_eos": True, "max_tokens": 12}
RESPONSES = {"input": "abc", "max_output_tokens": 12, "ignore_eos": True}


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
    watched: Watched,
    path: str,
    body: dict[str, Any],
    choices: int,
    input_tokens: int,
    output_tokens: int,
) -> None:
    request_id = f"both{path.replace('/', '-')}-{choices}-{'stream' in body}"
    response = watched.ask(path, request_id, body, **{"X-SLO-TTFT-ms": "1500"})
    assert response.status_code == 200
    assert response.content
    row = watched.row(request_id)
    assert (row["vantage"], row["status"], row["http_status"]) == ("joined", "ok", 200)
    assert (row["engine"], row["model"], row["route"]) == (ENGINE, MODEL, path)
    assert (row["input_tokens"], row["output_tokens"]) == (input_tokens, output_tokens)
    assert row["tenant"].startswith("key-")
    assert (row["preemptions"], row["finish_reason"]) == (0, "length")
    assert row["ttft_limit_s"] == 1.5
    assert row["engine_request_id"].startswith(row["response_id"])
    if choices == 1:
        assert row["queue_s"] + row["prefill_s"] <= row["engine_e2e_s"] <= row["e2e_s"]
    streamed_alone = choices == 1 and "stream" in body
    assert (row["max_gap_s"] is not None) == streamed_alone
    assert (row["holdback_s"] is not None) == streamed_alone


@pytest.mark.parametrize(
    ("name", "path", "body", "headers", "status", "http_status"),
    [
        ("key", "/v1/chat/completions", CHAT, {"Authorization": "Bearer no"}, "invalid", 401),
        ("tokens", "/v1/chat/completions", {**CHAT, "max_tokens": -4}, {}, "invalid", 400),
        ("length", "/v1/completions", {"prompt": "a b " * 4000}, {}, "invalid", 400),
        ("model", "/v1/chat/completions", {**CHAT, "model": "none"}, {}, "invalid", 404),
    ],
)
def test_a_request_that_vllm_refuses_is_a_row(
    watched: Watched,
    name: str,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
    status: str,
    http_status: int,
) -> None:
    assert watched.ask(path, f"refused-{name}", body, **headers).status_code == http_status
    row = watched.row(f"refused-{name}")
    assert (row["status"], row["http_status"]) == (status, http_status)
    assert row["vantage"] == "proxy"
    assert row["output_tokens"] is None


def test_a_request_whose_client_leaves_before_the_head_is_cancelled(watched: Watched) -> None:
    with pytest.raises(requests.ReadTimeout):
        requests.post(
            f"{watched.engine.url}/v1/chat/completions",
            json={"model": MODEL, **CHAT, "ignore_eos": True, "max_tokens": 1500},
            headers={"Authorization": f"Bearer {KEY}", "X-Request-Id": "left-whole"},
            timeout=(ANSWER_WITHIN_S, 0.2),
        )
    row = watched.row("left-whole")
    assert (row["status"], row["http_status"], row["error"]) == ("cancelled", None, "client_gone")
    assert (row["vantage"], row["engine_status"]) == ("joined", "cancelled")
    assert 0 < row["output_tokens"] < 1500


def test_a_stream_that_its_client_leaves_is_cancelled(watched: Watched) -> None:
    body = {**CHAT, **STREAMED, "max_tokens": 1500}
    with closing(watched.ask("/v1/chat/completions", "left-stream", body)) as response:
        next(response.iter_lines())
    row = watched.row("left-stream")
    assert (row["status"], row["http_status"], row["error"]) == ("cancelled", 200, "client_gone")
    assert row["first_byte_s"] <= row["ttft_s"] <= row["e2e_s"]
    assert 0 < row["output_tokens"] < 1500


def test_an_agent_and_a_vllm_on_one_machine_find_each_other_without_a_setting(
    watched: Watched,
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


def test_other_routes_are_counted(watched: Watched) -> None:
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
    watched: Watched,
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


def test_open_requests_are_known_and_fail_when_the_front_dies(watched: Watched) -> None:
    """The last test of its engine."""
    body = {**CHAT, **STREAMED, "max_tokens": 1900}
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
