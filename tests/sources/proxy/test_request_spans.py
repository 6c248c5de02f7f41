"""The span of the proxy: parent, attributes, status and sampling."""

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.context import Context
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span
from opentelemetry.proto.trace.v1.trace_pb2 import Status as SpanStatus
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.semconv._incubating.attributes import (
    gen_ai_attributes,
    http_attributes,
    url_attributes,
)
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.semconv.attributes.http_attributes import HTTP_REQUEST_METHOD, HTTP_ROUTE
from opentelemetry.semconv.attributes.server_attributes import SERVER_ADDRESS, SERVER_PORT
from opentelemetry.semconv.attributes.url_attributes import URL_PATH, URL_SCHEME
from opentelemetry.semconv.schemas import Schemas
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agent import __version__
from agent.records.request import ProxyView, RequestRecord, Status, Vantage
from agent.sources.proxy.exchange import RawHeaders
from agent.sources.proxy.headers import RequestHead
from agent.sources.proxy.request_spans import ProxyTracing
from tests.records.making import NOON, record

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STATE = (b"tracestate", b"vendor=x")
CLIENT = [(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode()), STATE]
UNSAMPLED = [(b"traceparent", f"00-{TRACE}-{PARENT}-00".encode()), STATE]


class Traced:
    def __init__(
        self, *, ratio: float = 1.0, slow: bool = False, client_sampling: bool = True
    ) -> None:
        self.bodies: list[bytes] = []
        self.tracing = ProxyTracing(
            self.bodies.append,
            service="agent-0",
            ratio=ratio,
            client_sampling=client_sampling,
            keep=lambda _: slow,
        )

    def scopes(self) -> list[ScopeSpans]:
        self.tracing.close()
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [
            scope
            for request in requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
        ]

    def spans(self) -> list[Span]:
        return [span for scope in self.scopes() for span in scope.spans]

    def span(self) -> Span:
        (span,) = self.spans()
        return span


@pytest.fixture
def traced() -> Iterator[Traced]:
    traced = Traced()
    yield traced
    traced.tracing.close()


def proxied_record(**fields: Any) -> RequestRecord:
    usual = {"vantage": Vantage.PROXY, "route": "/v1/chat/completions", "model": "llama"}
    return record(1, **{**usual, **fields})


def attributes(span: Span) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value")
        for pair in span.attributes
    }


def test_the_span_is_a_child_of_the_clients_span(traced: Traced) -> None:
    begun = traced.tracing.begin([*CLIENT, (b"tracestate", b"other=y")])
    begun.end(proxied_record(), None)
    span = traced.span()
    # Several lines are one list.
    assert dict(begun.headers)[b"tracestate"] == b"goodput=proxied,vendor=x,other=y"
    assert begun.trace_id == span.trace_id.hex() == TRACE
    assert begun.span_id == span.span_id.hex()
    assert dict(begun.headers)[b"traceparent"].decode() == f"00-{TRACE}-{begun.span_id}-01"
    assert span.parent_span_id.hex() == PARENT
    assert span.kind == Span.SPAN_KIND_SERVER


OTHER_VERSION = (b"traceparent", f"ff-{TRACE}-{PARENT}-01".encode())


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [STATE],
        [OTHER_VERSION, STATE],
        *([(b"traceparent", garbage)] for garbage in (b"garbage", b"\xff")),
    ],
)
def test_without_a_client_trace_a_new_trace_begins_with_no_state_of_another(
    traced: Traced, headers: list[tuple[bytes, bytes]]
) -> None:
    one, other = traced.tracing.begin(headers), traced.tracing.begin(headers)
    assert len({one.trace_id, other.trace_id, TRACE}) == 3
    assert dict(one.headers)[b"traceparent"].decode().startswith(f"00-{one.trace_id}-{one.span_id}")
    to_engine = RequestHead(headers).for_engine(one.headers, None, "http")
    lines = b"".join(to_engine).splitlines()
    assert {line.partition(b":")[0] for line in lines} == {
        b"traceparent", b"tracestate", b"x-forwarded-proto"
    }  # fmt: skip
    assert b"tracestate: goodput=proxied" in lines
    one.end(proxied_record(), None)
    assert traced.span().parent_span_id == b""


SHOWN = {
    "gen_ai.operation.name": "chat",
    "gen_ai.request.model": "llama",
    "gen_ai.response.model": "llama-adapter",
    "gen_ai.response.id": "chatcmpl-1",
    "gen_ai.usage.input_tokens": 7,
    "gen_ai.usage.output_tokens": 9,
    "gen_ai.usage.cache_read.input_tokens": 3,
    "gen_ai.request.stream": True,
    "gen_ai.request.choice.count": 2,
    "http.response.status_code": 200,
    "http.request.body.size": 50,
    "goodput.tenant": "team",
}


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
            proxied=ProxyView(streamed=True, choices=2, input_bytes=50, response_id="chatcmpl-1"),
        ),
        "llama-adapter",
    )
    span = traced.span()
    known = attributes(span)
    assert span.name == "chat llama"
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (
        round(NOON * 1e9),
        round((NOON + 2) * 1e9),
    )
    assert SHOWN.items() <= known.items()
    reasons = known["gen_ai.response.finish_reasons"].values
    assert [reason.string_value for reason in reasons] == ["stop", "length"]
    (event,) = span.events
    assert (event.name, event.time_unix_nano) == ("first_token", round((NOON + 0.25) * 1e9))


def test_unknown_fields_and_a_single_choice_are_no_attributes(traced: Traced) -> None:
    traced.tracing.begin([]).end(
        proxied_record(
            ttft_s=None, output_tokens=None, finish_reason=None, proxied=ProxyView(choices=1)
        ),
        None,
    )
    span = traced.span()
    absent = {"gen_ai.usage.output_tokens", "error.type", "gen_ai.request.choice.count"}
    assert not absent & attributes(span).keys()
    assert list(span.events) == []
    assert span.status.code == SpanStatus.STATUS_CODE_UNSET


# https://opentelemetry.io/docs/specs/semconv/http/http-spans/, "Status" and note 4: the status is
# unset for 1xx to 4xx of a server, unless another error kept the response from being sent whole.
@pytest.mark.parametrize(
    ("status", "http_status", "error", "error_type", "shown_status"),
    [
        (Status.OK, 200, None, None, 200),
        (Status.ERROR, 404, "http_404", None, 404),
        (Status.THROTTLED, 429, "http_429", None, 429),
        (Status.ERROR, 307, "http_307", None, 307),
        (Status.ERROR, 500, "http_500", "500", 500),
        (Status.THROTTLED, 503, "http_503", "503", 503),
        (Status.ERROR, 200, "stream_error", "stream_error", 200),
        # The request is blamed in the stream.
        (Status.INVALID, 200, "BadRequestError", None, 200),
        (Status.ERROR, 200, "engine_gone", "engine_gone", 200),
        (Status.CANCELLED, 200, "client_gone", "client_gone", 200),
        (Status.CANCELLED, None, "client_gone", "client_gone", None),
        # The proxy itself responds.
        (Status.ERROR, None, "unreachable", "unreachable", 502),
        (Status.TIMEOUT, None, "timeout", "timeout", 504),
        (Status.TIMEOUT, 200, "timeout", "timeout", 200),
    ],
)
def test_the_status_follows_the_http_conventions(
    traced: Traced,
    status: Status,
    http_status: int | None,
    error: str | None,
    error_type: str | None,
    shown_status: int | None,
) -> None:
    record = proxied_record(status=status, http_status=http_status, proxied=ProxyView(error=error))
    traced.tracing.begin([]).end(record, None)
    span = traced.span()
    known = attributes(span)
    failed = SpanStatus.STATUS_CODE_ERROR if error_type else SpanStatus.STATUS_CODE_UNSET
    assert (span.status.code, span.status.message) == (failed, "")
    assert known.get("error.type") == error_type
    assert known.get("http.response.status_code") == shown_status


def test_the_span_has_what_the_http_conventions_require_and_not_who_the_client_is(
    traced: Traced,
) -> None:
    headers = [
        (b"host", b"10.0.0.7:8080"),
        (b"x-forwarded-proto", b"https, http"),
        (b"x-forwarded-host", b"llm.example.com, inner:80"),
        (b"user-agent", b"curl/8"),
        (b"x-forwarded-for", b"10.9.8.7"),
    ]
    traced.tracing.begin(headers).end(proxied_record(), None)
    known = attributes(traced.span())
    required = {
        HTTP_REQUEST_METHOD: "POST",
        URL_SCHEME: "https",
        URL_PATH: "/v1/chat/completions",
        HTTP_ROUTE: "/v1/chat/completions",
        SERVER_ADDRESS: "llm.example.com",
    }
    assert known.items() >= required.items()
    assert "curl" not in str(known)
    assert "10.9.8.7" not in str(known)


@pytest.mark.parametrize(
    ("host", "address", "port"),
    [
        (b"10.0.0.7:8080", "10.0.0.7", 8080),
        (b"[::1]:8080", "::1", 8080),
        (b"llm", "llm", None),
        (b"llm:none", None, None),
        (b"[::1", None, None),
        (b"", None, None),
    ],
)
def test_the_server_is_the_host_of_the_request(
    traced: Traced, host: bytes, address: str | None, port: int | None
) -> None:
    traced.tracing.begin([(b"host", host)]).end(proxied_record(), None)
    known = attributes(traced.span())
    assert known[URL_SCHEME] == "http"
    assert (known.get(SERVER_ADDRESS), known.get(SERVER_PORT)) == (address, port)


# What vLLM's own spans have, which the conventions do not.
OF_VLLM = {"gen_ai.request.id", "gen_ai.latency.time_to_first_token", "gen_ai.latency.e2e"}


def test_every_name_is_one_of_the_conventions_or_has_our_prefix(traced: Traced) -> None:
    conventions = {
        value
        for module in (gen_ai_attributes, http_attributes, url_attributes)
        for value in vars(module).values()
        if isinstance(value, str)
    } | {ERROR_TYPE, SERVER_ADDRESS, SERVER_PORT}
    view = ProxyView(
        streamed=True, choices=2, first_byte_s=0.1, input_bytes=1, output_bytes=1, response_id="x"
    )
    known = {"tenant": "team", "http_status": 500, "status": Status.ERROR, "max_gap_s": 0.1}
    tokens = {"cached_tokens": 1, "reasoning_tokens": 1, "finish_reason": "stop"}
    begun = traced.tracing.begin([(b"host", b"llm:80")])
    begun.end(proxied_record(proxied=view, **known, **tokens), "llama")
    (scope,) = traced.scopes()
    assert (scope.scope.name, scope.scope.version) == ("goodput-agent", __version__)
    assert scope.schema_url in {schema.value for schema in Schemas}
    names = {name for name in attributes(scope.spans[0]) if not name.startswith("goodput.")}
    assert names - OF_VLLM <= conventions
    assert names >= OF_VLLM


def state_of(headers: RawHeaders) -> str | None:
    """The trace state that an engine's span inherits, by the SDK that vLLM uses."""
    carrier = {name.decode(): value.decode() for name, value in headers}
    context = TraceContextTextMapPropagator().extract(carrier, Context())
    span = TracerProvider(shutdown_on_exit=False).get_tracer("engine").start_span("x", context)
    assert span.get_span_context().trace_flags.sampled
    return span.get_span_context().trace_state.to_header()


NEW, PLAIN = "goodput=proxied", "goodput=proxied,vendor=x"
MARKED = "goodput=unsampled,vendor=x"


@pytest.mark.parametrize(
    ("client", "fields", "exported", "state"),
    [
        # What a client decides is final, for slow and failed requests, too; the agent needs the
        # engine's span all the same, and knows it by its state.
        (UNSAMPLED, {"slow": True}, 0, MARKED),
        (UNSAMPLED, {"slow": True, "status": Status.ERROR}, 0, MARKED),
        (CLIENT, {"ratio": 0.0}, 1, PLAIN),
        # The operator can override it.
        *(
            (c, {"client_sampling": False, "ratio": r}, r, PLAIN)
            for c in (CLIENT, UNSAMPLED)
            for r in (0, 1)
        ),
        # Failed and slow requests are exported at any ratio.
        *(
            ([], {"ratio": 0.0, "status": s}, 1, NEW)
            for s in (Status.ERROR, Status.TIMEOUT, Status.THROTTLED)
        ),
        ([], {"ratio": 0.0, "slow": True}, 1, NEW),
        ([], {"ratio": 0.0}, 0, NEW),
    ],
)
def test_which_requests_are_exported(
    client: RawHeaders, fields: dict[str, Any], exported: int, state: str
) -> None:
    options = dict(fields)
    status = options.pop("status", Status.OK)
    traced = Traced(**options)
    begun = traced.tracing.begin(client)
    begun.end(proxied_record(status=status), None)
    assert len(traced.spans()) == exported
    assert state_of(begun.headers) == state


def test_a_full_trace_state_loses_its_last_member_also_through_a_second_proxy() -> None:
    first, second = Traced(), Traced()
    full = ",".join(f"k{number}=v" for number in range(32))
    headers = [UNSAMPLED[0], (b"tracestate", full.encode())]
    begun = second.tracing.begin(first.tracing.begin(headers).headers)
    begun.end(proxied_record(), None)
    assert second.spans() == []
    state = state_of(begun.headers) or ""
    assert state.split(",") == ["goodput=unsampled", *full.split(",")[:31]]


def test_other_requests_are_sampled_by_trace_id() -> None:
    traced = Traced(ratio=0.25)
    for _ in range(400):
        traced.tracing.begin([]).end(proxied_record(), None)
    assert 50 < len(traced.spans()) < 150


def test_ids_are_unique_and_need_no_exporter() -> None:
    tracing = ProxyTracing(None, service="agent-0", keep=lambda _: True)
    begun = []
    for _ in range(5):
        begun += [tracing.begin([]), tracing.begin([])]
        for span in begun[-2:]:
            span.end(proxied_record(), None)
    tracing.close()
    assert len({span.trace_id for span in begun}) == len({span.span_id for span in begun}) == 10
    assert all(span.trace_id.encode() in span.headers[0][1] for span in begun)
