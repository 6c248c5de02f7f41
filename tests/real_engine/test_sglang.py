"""What the agent knows of requests to an SGLang with the plugin: no spans, no proxy, no flag."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
import requests

from tests.real_parts.agent_process import AgentApi, AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.sglang import MODEL, START_WITHIN_S, Sglang
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(START_WITHIN_S + 120)

ENGINE = "sglang-0"
KEY = "sk-test"
ANSWER_WITHIN_S = 60.0
ROW_WITHIN_S = 30.0

Row = dict[str, Any]
CHAT = {"messages": [{"role": "user", "content": "hello there"}]}


@dataclass(frozen=True, slots=True)
class Watched:
    """An engine with the plugin, and its agent."""

    engine: Sglang
    api: AgentApi

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

    def row(self, request_id: str) -> Row:
        """The one row of a request, once it is there."""

        def found() -> list[Row]:
            return [row for row in self.api.requests() if row["request_id"] == request_id]

        rows = eventually(found, within_s=ROW_WITHIN_S, what=f"a row of {request_id}")
        assert len(rows) == 1
        return rows[0]

    def counted(self, route: str) -> float:
        """How many responses of a route the plugin counted."""
        page = self.api.exposition()
        return total(page, "llm_engine_responses_total", engine=ENGINE, route=route)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
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
        yield Watched(engine, agent.api)


STREAMED = {"stream": True, "ignore_eos": True, "max_tokens": 12}
WHOLE = {"ignore_eos": True, "max_tokens": 12}


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
    if choices == 1:
        assert row["queue_s"] + row["prefill_s"] <= row["engine_e2e_s"] <= row["e2e_s"]
        assert 0 < row["engine_ttft_s"] <= row["engine_e2e_s"]
    streamed_alone = choices == 1 and "stream" in body
    assert (row["tpot_s"] is not None) == streamed_alone
    assert (row["holdback_s"] is not None) == streamed_alone


@pytest.mark.parametrize(
    ("name", "path", "body", "headers", "http_status"),
    [
        ("key", "/v1/chat/completions", CHAT, {"Authorization": "Bearer no"}, 401),
        ("tokens", "/v1/chat/completions", {**CHAT, "max_tokens": -4}, {}, 400),
        ("length", "/v1/completions", {"prompt": "a b " * 4000, "stream": True}, {}, 400),
    ],
)
def test_a_request_that_sglang_refuses_is_a_row(
    watched: Watched,
    name: str,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
    http_status: int,
) -> None:
    assert watched.ask(path, f"refused-{name}", body, **headers).status_code == http_status
    row = watched.row(f"refused-{name}")
    assert (row["vantage"], row["status"]) == ("proxy", "invalid")
    assert (row["http_status"], row["output_tokens"]) == (http_status, None)


def test_a_request_whose_client_leaves_before_the_head_is_cancelled(watched: Watched) -> None:
    with pytest.raises(requests.ReadTimeout):
        requests.post(
            f"{watched.engine.url}/v1/chat/completions",
            json={"model": MODEL, **CHAT, "ignore_eos": True, "max_tokens": 200},
            headers={"Authorization": f"Bearer {KEY}", "X-Request-Id": "left-whole"},
            timeout=(ANSWER_WITHIN_S, 0.2),
        )
    row = watched.row("left-whole")
    assert (row["status"], row["http_status"], row["error"]) == ("cancelled", None, "client_gone")
    # SGLang looks for the client every 4 s alone, so it may have computed all.
    assert row["vantage"] == "joined"
    assert 0 < row["output_tokens"] <= 200


def test_a_stream_that_its_client_leaves_is_cancelled(watched: Watched) -> None:
    body = {**CHAT, **STREAMED, "max_tokens": 1500}
    with closing(watched.ask("/v1/chat/completions", "left-stream", body)) as response:
        next(response.iter_lines())
    row = watched.row("left-stream")
    assert (row["status"], row["http_status"], row["error"]) == ("cancelled", 200, "client_gone")
    assert (row["vantage"], row["engine_status"]) == ("joined", "cancelled")
    assert 0 < row["output_tokens"] < 1500


def test_other_routes_are_counted_but_not_those_of_the_warm_up(watched: Watched) -> None:
    url, headers = watched.engine.url, {"Authorization": f"Bearer {KEY}"}
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 2}}
    for _ in range(3):
        requests.post(f"{url}/generate", json=body, headers=headers, timeout=ANSWER_WITHIN_S)
    eventually(lambda: watched.counted("/generate") >= 3, within_s=ROW_WITHIN_S, what="the routes")
    assert watched.counted("/generate") == 3


def test_the_agent_reads_the_metrics_of_a_running_sglang(watched: Watched) -> None:
    counts = ("output_tokens_total", "requests_finished_total", "request_duration_seconds_count")

    def unread() -> list[str]:
        page = watched.api.exposition()
        names = [f"llm_engine_{name}" for name in counts]
        return [name for name in names if not total(page, name, engine=ENGINE, model=MODEL)]

    eventually(lambda: not unread(), within_s=ROW_WITHIN_S, what="SGLang's own counts")
    assert total(watched.api.exposition(), "llm_engine_up", engine=ENGINE) == 1


def test_open_requests_fail_when_the_scheduler_dies(watched: Watched) -> None:
    """The last test of its engine, which ends itself then."""
    body = {**CHAT, **STREAMED, "max_tokens": 1900}
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
