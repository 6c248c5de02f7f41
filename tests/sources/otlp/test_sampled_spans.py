"""What is forwarded of exports with spans that the proxy's client does not sample."""

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agent.sources.otlp.json_payload import parse_json
from agent.sources.otlp.payload import JSON, PROTOBUF, Body, parse
from tests.sources.otlp.doors import DOORS, Door
from tests.sources.otlp.exports import export, in_json, json_bytes, vllm_span
from tests.sources.otlp.serving import LoopThread, Serving, serving

MARKED = "vendor=x,goodput=unsampled"
ALL_DOORS = pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)


def message_of(body: Body) -> ExportTraceServiceRequest:
    """The message of a forwarded body."""
    if body.content_type == JSON:
        return parse_json(body.content).message
    return parse(body.content).message


def forwarded_ids(bodies: list[Body]) -> list[bytes]:
    """The ids of the spans in forwarded bodies, which hold no others."""
    assert not any(body.gzipped for body in bodies)
    return [
        span.span_id
        for body in bodies
        for resource_spans in message_of(body).resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]


@ALL_DOORS
def test_a_marked_span_is_stored_and_not_forwarded(served: Serving, door: Door) -> None:
    spans = [vllm_span(), vllm_span(trace_state=MARKED), vllm_span(trace_state="vendor=x")]
    assert door.send(served, export(*spans)).is_full_success
    assert len(served.accepted.records) == 3
    assert forwarded_ids(served.forwarded) == [spans[0].span_id, spans[2].span_id]


@ALL_DOORS
def test_an_export_of_marked_spans_alone_is_not_forwarded(served: Serving, door: Door) -> None:
    request = export(vllm_span(trace_state=MARKED), vllm_span(trace_state="goodput=unsampled"))
    assert door.send(served, request).is_full_success
    assert len(served.accepted.records) == 2
    assert served.forwarded == []


@ALL_DOORS
@pytest.mark.parametrize("state", ["", "goodput=unsampled-not", "my-goodput=unsampled"])
def test_all_other_exports_are_forwarded_as_they_came(
    served: Serving, door: Door, state: str
) -> None:
    request = export(vllm_span({"note": "goodput=unsampled"}, trace_state=state))
    content = door.encode(request)
    assert door.send_bytes(served, content).is_full_success
    (body,) = served.forwarded
    if not body.gzipped:
        assert body.content == content


def test_the_rest_of_an_export_stays_as_it_was(served: Serving) -> None:
    request = export(vllm_span(links=[Span.Link(trace_state="a=b")]), vllm_span(trace_state=MARKED))
    request.resource_spans[0].schema_url = "https://opentelemetry.io/schemas/1.44.0"
    DOORS[0].send(served, request)
    (body,) = served.forwarded
    kept = ExportTraceServiceRequest.FromString(body.content)
    del request.resource_spans[0].scope_spans[0].spans[1]
    assert (kept, body.content_type) == (request, PROTOBUF)


def test_json_stays_json(served: Serving) -> None:
    content = in_json(export(vllm_span(), vllm_span(trace_state=MARKED)))
    (json_door,) = [door for door in DOORS if door.name == "http-json"]
    json_door.send_bytes(served, json_bytes(content))
    (body,) = served.forwarded
    del content["resourceSpans"][0]["scopeSpans"][0]["spans"][1]
    assert (body.content, body.content_type) == (json_bytes(content), JSON)


def test_the_clients_decision_can_be_overridden(loop: LoopThread) -> None:
    with loop.entered(serving(client_sampling=False)) as served:
        request = export(vllm_span(trace_state=MARKED))
        assert DOORS[0].send(served, request).is_full_success
        (body,) = served.forwarded
    assert ExportTraceServiceRequest.FromString(body.content) == request
