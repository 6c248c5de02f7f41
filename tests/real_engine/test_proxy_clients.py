"""The official clients and curl before the real vLLM, with and without the proxy: all the same."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import unquote

import pytest

from tests.real_engine.proxy_clients_asking import CHAT, COMPLETIONS, MESSAGES, RESPONSES, curl
from tests.real_engine.proxy_clients_cases import CASES, FIRST
from tests.real_engine.proxy_clients_comparing import (
    Case,
    Comparison,
    compare,
    compare_once,
    payloads,
)
from tests.real_engine.watching import ENGINE, Row, rows_once_there
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.clients import Door, Exchange
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import Vllm

pytestmark = pytest.mark.timeout(600)

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
def direct(engine: Vllm) -> Iterator[Door]:
    """The way to the engine without the proxy."""
    with closing(Door(engine.url)) as door:
        yield door


@pytest.fixture(scope="module")
def proxy_port() -> int:
    """Where the proxy listens."""
    return free_port()


@pytest.fixture(scope="module")
def agent(
    direct: Door, ports: AgentPorts, proxy_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AgentProcess]:
    """An agent whose proxy stands before the engine."""
    settings = {
        "engines": [{"name": ENGINE, "url": direct.url}],
        "proxy": {"listen": f"127.0.0.1:{proxy_port}"},
        "nvml": {"enabled": False},
    }
    folder = tmp_path_factory.mktemp("agent")
    with AgentProcess.with_settings(folder, ports, settings) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(agent: AgentProcess, proxy_port: int) -> Iterator[Door]:
    """The way through the proxy."""
    with closing(Door(f"http://127.0.0.1:{proxy_port}")) as door:
        yield door


@pytest.fixture(scope="module")
def first(direct: Door, proxy: Door) -> Comparison:
    """The first of all requests that the agent sees."""
    return compare_once(FIRST, direct, proxy)


@pytest.fixture(scope="module")
def asked(first: Comparison, direct: Door, proxy: Door) -> Asked:
    """Every case, one request at a time."""
    return {case.name: compare(case, direct, proxy) for case in CASES}


@pytest.fixture(scope="module")
def rows(asked: Asked, direct: Door, proxy: Door, agent: AgentProcess) -> list[Row]:
    """Every row of the agent when that of the last request is there."""
    last = Comparison(LAST)
    last.ask_proxy(proxy)
    return rows_once_there(agent.api, last.exchanges)


def assert_same(comparison: Comparison) -> None:
    if not comparison.same:
        repeats = f"the engine itself repeats itself: {comparison.repeats}"
        assert comparison.proxied[0].lines == comparison.direct[0].lines, repeats
    gists = [heard.gist for heard in comparison.direct]
    for heard in comparison.proxied:
        if heard.gist not in gists:
            assert heard.gist == gists[0]


@EACH_CASE
def test_a_client_gets_the_same_with_and_without_the_proxy(case: Case, asked: Asked) -> None:
    comparison = asked[case.name]
    assert {heard.status for heard in comparison.direct} == {case.status}, comparison.direct[0].body
    assert_same(comparison)


def test_the_first_stream_of_an_agent_is_the_same_too(first: Comparison) -> None:
    assert_same(first)


def path_of(exchange: Exchange) -> str:
    return unquote(exchange.path.partition("?")[0])


def is_measured(exchange: Exchange) -> bool:
    return exchange.method == "POST" and path_of(exchange) in MEASURED


def usage_of(exchange: Exchange) -> dict[str, int]:
    """The last counts of an answer, by the names that its protocol has for them."""
    counts: dict[str, int] = {}
    for payload in payloads(exchange.body):
        for told in (payload, payload.get("message"), payload.get("response")):
            usage = told.get("usage") if isinstance(told, dict) else None
            counts.update(usage or {})
    return counts


def counted_directly(exchange: Exchange, direct: Door) -> tuple[int | None, int | None]:
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
    """Whether somebody asks for the tokens: of several streamed choices only the client does."""
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
    case: Case, asked: Asked, rows: list[Row], direct: Door
) -> None:
    for request_id, exchange in asked[case.name].exchanges.items():
        found = [row for row in rows if row["request_id"] == request_id]
        assert len(found) == is_measured(exchange), request_id
        for row in found:
            told = (row["input_tokens"], row["output_tokens"])
            assert row["route"] == path_of(exchange)
            assert row["http_status"] == exchange.status
            assert row["finish_reason"] == finish_of(exchange)
            counted = counted_directly(exchange, direct)
            assert told == (counted if is_counted(exchange) else (None, None))
            if exchange.body.startswith((b"data: ", b"event: ")):
                assert 0 < row["ttft_s"] <= row["e2e_s"]
            else:
                assert row["ttft_s"] is None


def test_nothing_else_has_a_row_of_the_proxy(
    first: Comparison, asked: Asked, rows: list[Row]
) -> None:
    exchanges = [asked[case.name].exchanges for case in CASES]
    measured = {name for some in exchanges for name in some if is_measured(some[name])}
    proxied = {row["request_id"] for row in rows if row["route"] is not None}
    assert proxied - {*first.exchanges, LAST.request_id(0)} == measured
