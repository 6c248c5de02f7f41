"""Spans of llm-d's routers and of both engines at a running agent: one row of each request."""

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import requests
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.ports import free_port
from tests.real_parts.waiting import eventually
from tests.simulated import WITHIN_S
from tests.sources.otlp import router_exports as llm_d
from tests.sources.otlp.exports import export, vllm_span

pytestmark = pytest.mark.slow

PREFILL, DECODE = "prefill-0", "decode-0"


class Script:
    """Requests that began long enough ago; `at` gives the times of a span since its begin."""

    def __init__(self, http_port: int) -> None:
        self._url = f"http://127.0.0.1:{http_port}/v1/traces"
        self.trace_id, self.began_ns = secrets.token_bytes(16), time.time_ns() - 30_000_000_000

    def at(self, from_s: float, until_s: float, parent: Span | None = None) -> dict[str, Any]:
        return {
            "trace_id": self.trace_id,
            "parent_span_id": b"" if parent is None else parent.span_id,
            "start_time_unix_nano": self.began_ns + int(from_s * 1e9),
            "end_time_unix_nano": self.began_ns + int(until_s * 1e9),
        }

    def send(self, *exports: ExportTraceServiceRequest) -> None:
        for sent in exports:
            response = requests.post(
                self._url,
                data=sent.SerializeToString(),
                headers={"Content-Type": "application/x-protobuf"},
                timeout=WITHIN_S,
            )
            assert response.ok, response.text


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AgentProcess, int]]:
    away = {"same_machine": False}
    settings = {
        "engines": [
            {"name": name, "url": f"http://127.0.0.1:{free_port()}", "role": role, **away}
            for name, role in ((PREFILL, "prefill"), (DECODE, "decode"))
        ],
        "nvml": {"enabled": False},
    }
    ports = AgentPorts.free()
    folder = tmp_path_factory.mktemp("routed")
    with AgentProcess.with_settings(folder, ports, settings) as agent:
        yield agent, ports.http


def vllm(engine: str, given: dict[str, Any], **attributes: Any) -> ExportTraceServiceRequest:
    changed = {f"gen_ai.latency.{name}": value for name, value in attributes.items()}
    tokens = {"gen_ai.usage.completion_tokens": 1 if engine == PREFILL else 20}
    sent = vllm_span({**changed, **tokens}, **given)
    return export(sent, resource={"service.name": engine}, scope="vllm.llm_engine")


@dataclass(frozen=True)
class Told:
    """The agent after all spans, and the script of each request."""

    agent: AgentProcess
    whole: Script
    unwatched: Script
    failing: Script
    refused: Script

    def rows(self) -> dict[str, Any]:
        """The rows of requests by trace, without parts."""
        rows = self.agent.api.items("/api/v1/requests", {})
        return {each["trace_id"]: each for each in rows if not each["part"]}

    def row(self, script: Script) -> Any:
        return self.rows()[script.trace_id.hex()]

    def counted(self) -> tuple[int, int]:
        """The requests, and those of them that failed."""
        summary = self.agent.api.summary(window="1h")
        return summary["requests"], summary["failures"]["engine"]["failed"]


@pytest.fixture(scope="module")
def told(running: tuple[AgentProcess, int]) -> Told:
    agent, port = running
    found = Told(agent, *(Script(port) for _ in range(4)))
    send_whole(found.whole)
    unwatched, failing, refused = found.unwatched, found.failing, found.refused
    unwatched.send(llm_d.of_sidecar(llm_d.server_span(**unwatched.at(0.0, 1.0))))
    failing.send(
        llm_d.of_sidecar(llm_d.server_span(502, **failing.at(0.0, 1.0))),
        vllm(PREFILL, failing.at(0.1, 0.5), e2e=0.4),
    )
    refused.send(llm_d.of_picker(llm_d.refused_span(**refused.at(0.0, 0.2))))
    eventually(lambda: found.counted() == (3, 2), within_s=WITHIN_S, what="3 requests")
    return found


def send_whole(whole: Script) -> None:
    """Send every span of a request that prefill and decode engine served, the sidecar's twice."""
    server = llm_d.server_span(**whole.at(0.0, 2.55))
    inner = llm_d.inner_span(**whole.at(0.001, 2.55, server))
    prefill = llm_d.prefill_span(**whole.at(0.01, 0.53, inner))
    decode = llm_d.decode_span(**whole.at(0.535, 2.55, prefill))
    at_prefill = {"e2e": 0.52, "time_in_queue": 0.31, "time_to_first_token": 0.5}
    at_decode = {"e2e": 2.0, "time_in_queue": 0.22, "time_to_first_token": 0.27}
    whole.send(
        vllm(PREFILL, whole.at(0.01, 0.53, prefill), **at_prefill),
        llm_d.of_handler(prefill, decode, inner),
        llm_d.of_sidecar(server),
        vllm(DECODE, whole.at(0.54, 2.54, decode), **at_decode),
        llm_d.of_sidecar(server),
    )


def test_a_request_has_the_time_since_its_router_in_the_parts_of_its_first_token(
    told: Told,
) -> None:
    row = told.row(told.whole)
    assert (row["engine"], row["prefill_engine"], row["status"]) == (DECODE, PREFILL, "ok")
    assert (row["ttft_s"], row["router_wait_s"]) == (0.27, pytest.approx(0.54, abs=1e-5))
    outside = {"whole_s": 0.81, "router_s": 0.02, "prefill_s": 0.52}
    parts = {**outside, "kv_wait_s": 0.22, "decode_s": 0.05}
    assert row["first_token"] == pytest.approx(parts, abs=1e-5)


def test_what_failed_at_a_router_is_a_row_and_what_succeeded_elsewhere_is_none(told: Told) -> None:
    failing, refused = told.row(told.failing), told.row(told.refused)
    assert (failing["status"], failing["http_status"], failing["vantage"]) == (
        "error",
        502,
        "router",
    )
    assert (refused["status"], refused["http_status"]) == ("throttled", 429)
    assert refused["model"] == "llama"
    assert told.unwatched.trace_id.hex() not in told.rows()
