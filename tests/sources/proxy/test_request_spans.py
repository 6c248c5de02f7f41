"""The span of the proxy: parent, attributes, status and sampling."""

from collections.abc import Iterator
from dataclasses import dataclass
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
    """A tracing and its exported spans."""

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
    begun.end(proxied_record(), None)
    span = traced.span()
    assert begun.trace_id == span.trace_id.hex() == TRACE
    assert begun.span_id == span.span_id.hex()
    assert dict(begun.headers)[b"traceparent"].decode() == f"00-{TRACE}-{begun.span_id}-01"
    assert span.parent_span_id.hex() == PARENT
    assert span.kind == Span.SPAN_KIND_SERVER


def test_several_lines_of_trace_state_are_one_list(traced: Traced) -> None:
    headers = [*CLIENT, (b"tracestate", b"other=y")]
    assert dict(traced.tracing.begin(headers).headers)[b"tracestate"] == b"vendor=x,other=y"


@pytest.mark.parametrize("parent", [[], [(b"traceparent", f"ff-{TRACE}-{PARENT}-01".encode())]])
def test_a_new_trace_has_nothing_of_the_state_of_another(
    traced: Traced, parent: list[tuple[bytes, bytes]]
) -> None:
    begun = traced.tracing.begin([*parent, STATE])
    assert begun.trace_id != TRACE
    to_engine = RequestHead([*parent, STATE]).for_engine(begun.headers, None, "http")
    assert {name for name, _ in to_engine} == {b"traceparent", b"x-forwarded-proto"}


@pytest.mark.parametrize(
    "headers", [[], [(b"traceparent", b"garbage")], [(b"traceparent", b"\xff")]]
)
def test_without_a_client_trace_a_new_trace_begins(
    traced: Traced, headers: list[tuple[bytes, bytes]]
) -> None:
    one, other = traced.tracing.begin(headers), traced.tracing.begin(headers)
    assert one.trace_id != other.trace_id
    assert dict(one.headers)[b"traceparent"].decode().startswith(f"00-{one.trace_id}-{one.span_id}")
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


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request ended, and what the conventions say of its span.

    https://opentelemetry.io/docs/specs/semconv/http/http-spans/, "Status" and note 4: the status is
    unset for 1xx to 4xx of a server, unless another error kept the response from being sent whole.
    """

    status: Status
    http_status: int | None
    error: str | None
    error_type: str | None
    shown_status: int | None


ENDED = {
    "complete": Ended(Status.OK, 200, None, None, 200),
    "client error": Ended(Status.ERROR, 404, "http_404", None, 404),
    "throttled": Ended(Status.THROTTLED, 429, "http_429", None, 429),
    "redirect": Ended(Status.ERROR, 307, "http_307", None, 307),
    "server error": Ended(Status.ERROR, 500, "http_500", "500", 500),
    "overloaded": Ended(Status.THROTTLED, 503, "http_503", "503", 503),
    "error in the stream": Ended(Status.ERROR, 200, "stream_error", "stream_error", 200),
    "request blamed in the stream": Ended(Status.INVALID, 200, "BadRequestError", None, 200),
    "cut by the engine": Ended(Status.ERROR, 200, "engine_gone", "engine_gone", 200),
    "client left": Ended(Status.CANCELLED, 200, "client_gone", "client_gone", 200),
    "client left early": Ended(Status.CANCELLED, None, "client_gone", "client_gone", None),
    # The proxy itself responds.
    "no engine": Ended(Status.ERROR, None, "unreachable", "unreachable", 502),
    "late engine": Ended(Status.TIMEOUT, None, "timeout", "timeout", 504),
    "late in the stream": Ended(Status.TIMEOUT, 200, "timeout", "timeout", 200),
}


@pytest.mark.parametrize("ended", ENDED.values(), ids=ENDED.keys())
def test_the_status_follows_the_http_conventions(traced: Traced, ended: Ended) -> None:
    record = proxied_record(
        status=ended.status, http_status=ended.http_status, proxied=ProxyView(error=ended.error)
    )
    traced.tracing.begin([]).end(record, None)
    span = traced.span()
    known = attributes(span)
    failed = SpanStatus.STATUS_CODE_ERROR if ended.error_type else SpanStatus.STATUS_CODE_UNSET
    assert (span.status.code, span.status.message) == (failed, "")
    assert known.get("error.type") == ended.error_type
    assert known.get("http.response.status_code") == ended.shown_status


def test_the_span_tells_nothing_of_who_the_client_is(traced: Traced) -> None:
    headers = [(b"user-agent", b"curl/8"), (b"x-forwarded-for", b"10.9.8.7"), (b"host", b"llm")]
    traced.tracing.begin(headers).end(proxied_record(), None)
    told = str(attributes(traced.span()))
    assert "curl" not in told
    assert "10.9.8.7" not in told


def test_the_span_has_what_the_http_conventions_require(traced: Traced) -> None:
    headers = [(b"host", b"10.0.0.7:8080"), (b"x-forwarded-proto", b"https, http")]
    forwarded = (b"x-forwarded-host", b"llm.example.com, inner:80")
    traced.tracing.begin([*headers, forwarded]).end(proxied_record(), None)
    route = "/v1/chat/completions"
    assert (
        attributes(traced.span()).items()
        >= {
            HTTP_REQUEST_METHOD: "POST",
            URL_SCHEME: "https",
            URL_PATH: route,
            HTTP_ROUTE: route,
            SERVER_ADDRESS: "llm.example.com",
        }.items()
    )


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


def test_the_scope_has_a_version_and_the_schema_of_its_names(traced: Traced) -> None:
    traced.tracing.begin([]).end(proxied_record(), None)
    (scope,) = traced.scopes()
    assert (scope.scope.name, scope.scope.version) == ("goodput-agent", __version__)
    assert scope.schema_url in {schema.value for schema in Schemas}


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
    names = {name for name in attributes(traced.span()) if not name.startswith("goodput.")}
    assert names - OF_VLLM <= conventions
    assert names >= OF_VLLM


def state_of(headers: RawHeaders) -> str | None:
    """The trace state that an engine's span inherits, by the SDK that vLLM uses."""
    carrier = {name.decode(): value.decode() for name, value in headers}
    context = TraceContextTextMapPropagator().extract(carrier, Context())
    span = TracerProvider(shutdown_on_exit=False).get_tracer("engine").start_span("x", context)
    assert span.get_span_context().trace_flags.sampled
    return span.get_span_context().trace_state.to_header()


PLAIN, MARKED = "vendor=x", "goodput=unsampled,vendor=x"


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
            ([], {"ratio": 0.0, "status": s}, 1, None)
            for s in (Status.ERROR, Status.TIMEOUT, Status.THROTTLED)
        ),
        ([], {"ratio": 0.0, "slow": True}, 1, None),
        ([], {"ratio": 0.0}, 0, None),
    ],
)
def test_which_requests_are_exported(
    client: RawHeaders, fields: dict[str, Any], exported: int, state: str | None
) -> None:
    options = dict(fields)
    status = options.pop("status", Status.OK)
    traced = Traced(**options)
    begun = traced.tracing.begin(client)
    begun.end(proxied_record(status=status), None)
    assert len(traced.spans()) == exported
    assert state_of(begun.headers) == (state or "")


def test_the_decision_passes_through_a_second_proxy() -> None:
    first, second = Traced(), Traced()
    begun = second.tracing.begin(first.tracing.begin(UNSAMPLED).headers)
    begun.end(proxied_record(), None)
    assert second.spans() == []
    assert state_of(begun.headers) == "goodput=unsampled,vendor=x"


def test_a_full_trace_state_loses_its_last_member() -> None:
    full = ",".join(f"k{number}=v" for number in range(32))
    headers = [UNSAMPLED[0], (b"tracestate", full.encode())]
    state = state_of(Traced().tracing.begin(headers).headers)
    assert state is not None
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
        together = [tracing.begin([]), tracing.begin([])]
        begun += together
        for span in together:
            span.end(proxied_record(), None)
    tracing.close()
    assert len({span.trace_id for span in begun}) == len({span.span_id for span in begun}) == 10
    assert all(span.trace_id.encode() in span.headers[0][1] for span in begun)
