"""The span of the proxy: parent, attributes, status and sampling."""

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.proto.trace.v1.trace_pb2 import Status as SpanStatus

from agent.records.request import ProxyView, RequestRecord, Status, Vantage
from agent.sources.proxy.tracing.request_spans import ProxyTracing
from tests.records.making import NOON, record

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CLIENT = [(b"traceparent", f"00-{TRACE}-{PARENT}-00".encode()), (b"tracestate", b"vendor=x")]


class Traced:
    """A tracing and its exported spans."""

    def __init__(self, *, ratio: float = 1.0, slow: bool = False) -> None:
        self.bodies: list[bytes] = []
        self.tracing = ProxyTracing(
            self.bodies.append, service="agent-0", ratio=ratio, keep=lambda _: slow
        )

    def spans(self) -> list[Span]:
        self.tracing.close()
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [
            span
            for request in requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def span(self) -> Span:
        (span,) = self.spans()
        return span


@pytest.fixture
def traced() -> Iterator[Traced]:
    traced = Traced()
    yield traced
    traced.tracing.close()


def proxied_record(**fields: Any) -> RequestRecord:
    """A record of the proxy."""
    usual = {"vantage": Vantage.PROXY, "route": "/v1/chat/completions", "model": "llama"}
    return record(1, **{**usual, **fields})


def attributes(span: Span) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value")
        for pair in span.attributes
    }


def test_the_span_is_a_child_of_the_clients_span(traced: Traced) -> None:
    begun = traced.tracing.begin(CLIENT)
    begun.end(proxied_record())
    span = traced.span()
    assert begun.trace_id == span.trace_id.hex() == TRACE
    assert begun.span_id == span.span_id.hex()
    assert span.parent_span_id.hex() == PARENT
    assert span.kind == Span.SPAN_KIND_SERVER


def test_the_engine_gets_this_span_as_parent_and_sampled(traced: Traced) -> None:
    begun = traced.tracing.begin(CLIENT)
    sent = dict(begun.headers)
    assert sent[b"traceparent"].decode() == f"00-{TRACE}-{begun.span_id}-01"
    assert sent[b"tracestate"] == b"vendor=x"


@pytest.mark.parametrize(
    "headers", [[], [(b"traceparent", b"garbage")], [(b"traceparent", b"\xff")]]
)
def test_without_a_client_trace_a_new_trace_begins(
    traced: Traced, headers: list[tuple[bytes, bytes]]
) -> None:
    one, other = traced.tracing.begin(headers), traced.tracing.begin(headers)
    assert one.trace_id != other.trace_id
    assert dict(one.headers)[b"traceparent"].decode().startswith(f"00-{one.trace_id}-{one.span_id}")
    one.end(proxied_record())
    assert traced.span().parent_span_id == b""


def test_the_span_has_the_fields_of_the_record(traced: Traced) -> None:
    traced.tracing.begin([]).end(
        proxied_record(
            started_at=NOON,
            ended_at=NOON + 2,
            ttft_s=0.25,
            input_tokens=7,
            output_tokens=9,
            cached_tokens=3,
            finish_reason="stop,length",
            http_status=200,
            tenant="team",
            proxied=ProxyView(streamed=True, choices=2, input_bytes=50),
        )
    )
    span = traced.span()
    known = attributes(span)
    assert span.name == "chat llama"
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (
        round(NOON * 1e9),
        round((NOON + 2) * 1e9),
    )
    wanted = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "llama",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.request.stream": True,
        "gen_ai.request.choice.count": 2,
        "http.response.status_code": 200,
        "http.request.body.size": 50,
        "goodput.tenant": "team",
    }
    assert wanted.items() <= known.items()
    reasons = known["gen_ai.response.finish_reasons"].values
    assert [reason.string_value for reason in reasons] == ["stop", "length"]
    (event,) = span.events
    assert (event.name, event.time_unix_nano) == ("first_token", round((NOON + 0.25) * 1e9))


def test_unknown_fields_are_no_attributes(traced: Traced) -> None:
    traced.tracing.begin([]).end(
        proxied_record(ttft_s=None, output_tokens=None, finish_reason=None)
    )
    span = traced.span()
    assert not {"gen_ai.usage.output_tokens", "error.type"} & attributes(span).keys()
    assert list(span.events) == []
    assert span.status.code == SpanStatus.STATUS_CODE_UNSET


def test_a_failed_request_has_an_error_type(traced: Traced) -> None:
    traced.tracing.begin([]).end(
        proxied_record(status=Status.ERROR, proxied=ProxyView(error="engine_gone"))
    )
    span = traced.span()
    assert attributes(span)["error.type"] == "engine_gone"
    assert span.status.code == SpanStatus.STATUS_CODE_ERROR


@pytest.mark.parametrize("status", [Status.ERROR, Status.TIMEOUT, Status.THROTTLED])
def test_a_failed_request_is_exported_at_any_ratio(status: Status) -> None:
    traced = Traced(ratio=0.0)
    traced.tracing.begin([]).end(proxied_record(status=status))
    assert len(traced.spans()) == 1


def test_a_slow_request_is_exported_at_any_ratio() -> None:
    traced = Traced(ratio=0.0, slow=True)
    traced.tracing.begin([]).end(proxied_record())
    assert len(traced.spans()) == 1


def test_other_requests_are_sampled_by_trace_id() -> None:
    traced = Traced(ratio=0.25)
    for _ in range(2000):
        traced.tracing.begin([]).end(proxied_record())
    assert 400 < len(traced.spans()) < 600


def test_without_an_exporter_a_span_still_has_ids() -> None:
    tracing = ProxyTracing(None, service="agent-0", keep=lambda _: True)
    begun = tracing.begin([])
    begun.end(proxied_record())
    tracing.close()
    assert len(begun.trace_id) == 32


def test_ids_are_unique() -> None:
    tracing = ProxyTracing(None, service="agent-0", keep=lambda _: True)
    begun = []
    for _ in range(5):
        together = [tracing.begin([]), tracing.begin([])]
        begun += together
        for span in together:
            span.end(proxied_record())
    assert len({span.trace_id for span in begun}) == len({span.span_id for span in begun}) == 10
    assert all(span.trace_id.encode() in span.headers[0][1] for span in begun)
