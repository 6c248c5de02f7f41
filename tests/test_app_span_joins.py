"""Spans of engines that are joined with the requests of the running agent's proxy, or are not."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
import requests
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.ports import free_port
from tests.real_parts.waiting import eventually
from tests.simulated import WITHIN_S
from tests.sources.engines.fixture_pages import body
from tests.sources.engines.wire import EngineServer
from tests.sources.otlp.exports import export, vllm_span

CHAT = "/v1/chat/completions"
ANSWER = {
    "id": "chatcmpl-1",
    "model": "tiny-llama",
    "choices": [{"finish_reason": "stop", "message": {"content": "hi"}}],
    "usage": {"prompt_tokens": 300, "completion_tokens": 11},
}
UNKNOWN = b"\xbb" * 8


@dataclass
class Proxied:
    """The agent with its proxy before one engine that responds and sends spans."""

    agent: AgentProcess
    engine: EngineServer
    url: str
    otlp: str
    # When the engine worked on the last request, in nanoseconds.
    worked: list[int]

    def call(self, trace_id: bytes) -> bytes:
        """Send a request; returns the id of the proxy's span, which the engine got."""
        sent = f"00-{trace_id.hex()}-{'c' * 16}-01"
        asked = {"model": "tiny-llama", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"traceparent": sent}
        requests.post(self.url + CHAT, json=asked, headers=headers, timeout=WITHIN_S)
        got = {name.lower(): text for name, text in self.engine.posted[-1][0].items()}
        return bytes.fromhex(got["traceparent"].split("-")[2])

    def send(self, *spans: Span, scope: str) -> None:
        """Send spans, as the engine does."""
        content = export(*spans, scope=scope).SerializeToString()
        kind = {"Content-Type": "application/x-protobuf"}
        requests.post(self.otlp, data=content, headers=kind, timeout=WITHIN_S).raise_for_status()

    def rows(self, trace_id: bytes, count: int) -> list[dict[str, Any]]:
        """The counted rows of a trace, once there are so many."""

        def found() -> list[dict[str, Any]]:
            rows = self.agent.api.requests()
            of_trace = (each for each in rows if each["trace_id"] == trace_id.hex())
            return [each for each in of_trace if not each["part"]]

        def settled() -> list[dict[str, Any]]:
            rows = found()
            return rows if len(rows) == count and rows[0]["vantage"] == "joined" else []

        return eventually(settled, within_s=WITHIN_S, what=f"{count} joined rows")


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    port, ports = free_port(), AgentPorts.free()
    with EngineServer() as engine:
        engine.answers("/metrics", body("vllm-0.32.0"))
        engine.answers("/v1/models", b'{"data": [{"id": "tiny-llama"}]}')
        worked: list[int] = []
        engine.scripts[CHAT] = partial(_respond, worked)
        settings = {
            "engines": [{"name": "chat-0", "url": engine.url}],
            "proxy": {"listen": f"127.0.0.1:{port}", "join_wait": "2s"},
            "nvml": {"enabled": False},
        }
        folder = tmp_path_factory.mktemp("joins")
        with AgentProcess.with_settings(folder, ports, settings) as agent:
            url = f"http://127.0.0.1:{port}"
            yield Proxied(agent, engine, url, f"http://127.0.0.1:{ports.http}/v1/traces", worked)


def _respond(worked: list[int], handler: BaseHTTPRequestHandler) -> None:
    worked[:] = [time.time_ns(), time.time_ns()]
    content = json.dumps(ANSWER).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    handler.wfile.write(head.encode() + content)


def span_of(proxied: Proxied, trace_id: bytes, parent: bytes, **fields: Any) -> Span:
    """A span of the engine of its last request."""
    begin, end = proxied.worked
    return vllm_span(
        trace_id=trace_id,
        parent_span_id=parent,
        start_time_unix_nano=begin,
        end_time_unix_nano=end,
        **fields,
    )


def test_calls_of_one_trace_are_joined_with_grandchildren_by_time(proxied: Proxied) -> None:
    trace_id = b"\x01" * 16
    pairs: dict[str, str] = {}
    spans = []
    for _ in range(3):
        parent = proxied.call(trace_id)
        spans.append(span_of(proxied, trace_id, UNKNOWN))
        pairs[parent.hex()] = spans[-1].span_id.hex()
    proxied.send(*spans, scope="vllm.llm_engine")
    rows = proxied.rows(trace_id, 3)
    assert {each["proxy_span_id"]: each["span_id"] for each in rows} == pairs


def test_a_request_through_prefill_and_decode_is_one_row_with_the_decodes_span(
    proxied: Proxied,
) -> None:
    trace_id = b"\x02" * 16
    parent = proxied.call(trace_id)
    first = {"gen_ai.usage.completion_tokens": 1}
    prefill = span_of(proxied, trace_id, parent, changed=first, name="prefill Req 5f1e")
    decode = span_of(proxied, trace_id, parent, name="decode Req 5f1e")
    proxied.send(prefill, scope="sglang server")
    proxied.send(decode, scope="sglang server")
    (row,) = proxied.rows(trace_id, 1)
    assert (row["span_id"], row["output_tokens"]) == (decode.span_id.hex(), 11)
    # It has that of the span: how long SGLang had the prefill.
    assert row["prefill_hop_s"] == 1.2
