"""Spans of llm-d's routers: one of each request is read, and its outcome."""

import time

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agent.records.engine import EngineIdentity
from agent.records.request import RequestRecord, Status, Vantage
from agent.sources.otlp.span_reader import ExportContent, SpanReader
from tests.sources.otlp import router_exports as llm_d
from tests.sources.otlp.exports import any_value

READER = SpanReader(lambda _: EngineIdentity(engine="decode-0", model="llama"), "agent-0")


def read(request: ExportTraceServiceRequest) -> ExportContent:
    return READER.read(request, time.time())


def record(request: ExportTraceServiceRequest) -> RequestRecord:
    (found,) = read(request).records
    return found


def test_the_view_of_the_sidecar_has_times_route_and_outcome_and_no_latency() -> None:
    parent = bytes(7) + b"\x09"
    sent = llm_d.server_span(parent_span_id=parent)
    found = record(llm_d.of_sidecar(sent))
    assert (found.vantage, found.status, found.http_status) == (Vantage.ROUTER, Status.OK, 200)
    assert (found.route, found.service_name) == ("/v1/chat/completions", "llm-d-disagg-sidecar")
    assert found.ended_at - found.started_at == pytest.approx(1.2)
    assert (found.parent_span_id, found.span_id) == (parent.hex(), sent.span_id.hex())
    # Of the agent's engines none is known to have seen it.
    assert (found.engine, found.ttft_s, found.e2e_s) == (None, None, None)


@pytest.mark.parametrize(
    ("http_status", "status"),
    [(400, "invalid"), (404, "invalid"), (429, "throttled"), (500, "error"), (503, "throttled")],
)
def test_the_http_status_says_how_a_request_failed(http_status: int, status: str) -> None:
    found = record(llm_d.of_sidecar(llm_d.server_span(http_status)))
    assert (found.status, found.http_status) == (status, http_status)


def test_a_response_that_broke_off_is_no_failure() -> None:
    """Its client may have left."""
    found = record(llm_d.of_sidecar(llm_d.server_span(None)))
    assert (found.status, found.http_status) == (Status.OK, None)


@pytest.mark.parametrize(
    "other",
    [
        llm_d.inner_span(),
        llm_d.inner_span("llm_d.pd_proxy.request"),
        llm_d.prefill_span(),
        llm_d.decode_span(),
        llm_d.server_span(path="/v1/models"),
        llm_d.server_span(name="llm_d.pd_proxy.GET /v1/chat/completions"),
        llm_d.server_span(kind=Span.SPAN_KIND_CLIENT),
    ],
    ids=lambda span: span.name,
)
def test_no_other_span_of_the_sidecar_is_a_request(other: Span) -> None:
    content = read(llm_d.of_handler(other))
    assert (content.records, content.passed) == ([], 1)


@pytest.mark.parametrize(
    ("code", "status", "http_status"),
    [
        ("ResourceExhausted", "throttled", 429),
        ("ServiceUnavailable", "throttled", 503),
        ("BadRequest", "invalid", 400),
        ("Internal", "error", 500),
        ("Odd", "error", None),
    ],
)
def test_a_refusal_of_the_endpoint_picker_is_a_failed_request(
    code: str, status: str, http_status: int | None
) -> None:
    found = record(llm_d.of_picker(llm_d.refused_span(code)))
    assert (found.vantage, found.status, found.http_status) == ("router", status, http_status)
    assert found.model == "llama"


def test_a_request_that_the_picker_passes_on_is_left_to_the_sidecar() -> None:
    passed = llm_d.refused_span()
    passed.ClearField("status")
    assert read(llm_d.of_picker(passed)).records == []


def test_a_model_that_no_database_can_store_is_dropped() -> None:
    refused = llm_d.refused_span()
    refused.attributes[0].value.CopyFrom(any_value("a\0b"))
    content = read(llm_d.of_picker(refused))
    assert content.records[0].model is None
    assert content.screened["model", "control_character"] == 1
