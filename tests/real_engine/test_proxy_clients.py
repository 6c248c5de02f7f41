"""The official clients and curl before the real vLLM, with and without the proxy: all the same."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import unquote

import pytest

from tests.real_engine.proxy_clients import (
    CASES,
    CHAT,
    COMPLETIONS,
    FIRST,
    MESSAGES,
    RESPONSES,
    Case,
    Comparison,
    compare,
    curl,
    payloads,
)
from tests.real_engine.watching import ENGINE, Row, rows_once_there
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.clients import Clients, Exchange
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import Vllm

pytestmark = pytest.mark.timeout(1500)

MEASURED = {CHAT, COMPLETIONS, RESPONSES, MESSAGES}
LAST = Case("last of all", curl("POST", CHAT, model="nobody", messages=[]))
REASONS = {
    "max_tokens": "length",
    "max_output_tokens": "length",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "completed": "stop",
    "tool_use": "tool_calls",
}
EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)

Asked = dict[str, Comparison]


@pytest.fixture(scope="module")
def direct(engine: Vllm) -> Iterator[Clients]:
    """The way to the engine without the proxy."""
    with closing(Clients(engine.url)) as clients:
        yield clients


@pytest.fixture(scope="module")
def proxy_port() -> int:
    """Where the proxy listens."""
    return free_port()


@pytest.fixture(scope="module")
def agent(
    direct: Clients, ports: AgentPorts, proxy_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AgentProcess]:
    """An agent whose proxy stands before the engine."""
    settings = {
        "engines": [{"name": ENGINE, "url": direct.url}],
        # The one header that the proxy adds, where neither client nor engine names the request.
        "proxy": {"listen": f"127.0.0.1:{proxy_port}", "return_request_id": False},
        "nvml": {"enabled": False},
    }
    folder = tmp_path_factory.mktemp("agent")
    with AgentProcess.with_settings(folder, ports, settings) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(agent: AgentProcess, proxy_port: int) -> Iterator[Clients]:
    """The way through the proxy."""
    with closing(Clients(f"http://127.0.0.1:{proxy_port}")) as clients:
        yield clients


@pytest.fixture(scope="module")
def first(direct: Clients, proxy: Clients) -> Comparison:
    """The first of all requests that the agent sees."""
    return compare(FIRST, direct, proxy)


@pytest.fixture(scope="module")
def asked(first: Comparison, direct: Clients, proxy: Clients) -> Asked:
    """Every case, one request at a time."""
    return {case.name: compare(case, direct, proxy) for case in CASES}


@pytest.fixture(scope="module")
def rows(asked: Asked, direct: Clients, proxy: Clients, agent: AgentProcess) -> list[Row]:
    """Every row of the agent when that of the last request is there."""
    last = compare(LAST, direct, proxy)
    return rows_once_there(agent.api, {last.request_id})


@EACH_CASE
def test_a_client_gets_the_same_with_and_without_the_proxy(case: Case, asked: Asked) -> None:
    comparison = asked[case.name]
    assert comparison.direct.status == case.status, comparison.direct.body
    assert comparison.proxied.comparable == comparison.direct.comparable


def test_the_first_stream_of_an_agent_is_the_same_too(first: Comparison) -> None:
    assert first.proxied.comparable == first.direct.comparable


def path_of(exchange: Exchange) -> str:
    return unquote(exchange.path.partition("?")[0])


def is_measured(exchange: Exchange) -> bool:
    return exchange.method == "POST" and path_of(exchange) in MEASURED


def usage_of(exchange: Exchange) -> dict[str, int]:
    """The last counts of an answer, by the names that its protocol has for them."""
    counts: dict[str, int] = {}
    for payload in payloads(exchange.body):
        for part in (payload, payload.get("message"), payload.get("response")):
            usage = part.get("usage") if isinstance(part, dict) else None
            counts.update(usage or {})
    return counts


def counted_directly(exchange: Exchange, direct: Clients) -> tuple[int | None, int | None]:
    """The tokens of the input and the output, as the engine counts them for who asks it to."""
    if exchange.status != 200:
        return None, None
    if not usage_of(exchange):
        asked = {**json.loads(exchange.sent), "stream_options": {"include_usage": True}}
        direct.curl("POST", path_of(exchange), sent=json.dumps(asked).encode())
        exchange = direct.exchange
    counts = usage_of(exchange)
    return (
        counts.get("prompt_tokens", counts.get("input_tokens")),
        counts.get("completion_tokens", counts.get("output_tokens")),
    )


def is_counted(exchange: Exchange) -> bool:
    """Whether the response counts its tokens: those of several choices only if asked to."""
    if not exchange.body.startswith(b"data: ") or b'"usage":{' in exchange.body:
        return True
    asked = json.loads(exchange.sent)
    prompts = asked.get("prompt")
    several = isinstance(prompts, list) and isinstance(prompts[0], str) and len(prompts) > 1
    return not (several or asked.get("n", 1) > 1)


def reasons_of(payload: dict[str, Any]) -> Iterator[str | None]:
    """Why an answer ended, in the words of its protocol."""
    yield from (choice["finish_reason"] for choice in payload.get("choices", ()))
    yield payload.get("stop_reason")
    if isinstance(payload.get("delta"), dict):
        yield payload["delta"].get("stop_reason")
    response = payload.get("response", payload)
    if response.get("object") == "response" and response["status"] != "in_progress":
        called = any(item["type"] == "function_call" for item in response["output"])
        incomplete = response["incomplete_details"]
        yield incomplete["reason"] if incomplete else "tool_calls" if called else "completed"


def finish_of(exchange: Exchange) -> str | None:
    reasons = {reason for payload in payloads(exchange.body) for reason in reasons_of(payload)}
    return ",".join(sorted({REASONS.get(reason, reason) for reason in reasons if reason})) or None


@EACH_CASE
def test_the_agent_has_one_row_of_each_measured_request(
    case: Case, asked: Asked, rows: list[Row], direct: Clients
) -> None:
    request_id, exchange = asked[case.name].request_id, asked[case.name].exchange
    found = [row for row in rows if row["request_id"] == request_id]
    assert len(found) == is_measured(exchange), request_id
    for row in found:
        assert row["route"] == path_of(exchange)
        assert row["http_status"] == exchange.status
        assert row["finish_reason"] == finish_of(exchange)
        counted = counted_directly(exchange, direct)
        tokens = (row["input_tokens"], row["output_tokens"])
        # The engine's spans count several choices, but not how many prompts a completion had.
        of_spans = (counted[0] if "/chat/" in path_of(exchange) else None, counted[1])
        assert tokens == (counted if is_counted(exchange) else of_spans)
        if exchange.body.startswith((b"data: ", b"event: ")):
            assert 0 < row["ttft_s"] <= row["e2e_s"]
        else:
            assert row["ttft_s"] is None


def test_nothing_else_has_a_row_of_the_proxy(
    first: Comparison, asked: Asked, rows: list[Row]
) -> None:
    measured = {asked[case.name] for case in CASES if is_measured(asked[case.name].exchange)}
    proxied = {row["request_id"] for row in rows if row["route"] is not None}
    others = {first.request_id, LAST.request_id}
    assert proxied - others == {comparison.request_id for comparison in measured}
