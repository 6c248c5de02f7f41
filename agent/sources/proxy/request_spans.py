"""Makes the span of each exchange: a child of the client's span, the parent of the engine's.

Names of attributes: open-telemetry/semantic-conventions, docs/http/http-spans.md (stable), and
open-telemetry/semantic-conventions-genai, docs/gen-ai/gen-ai-spans.md (development, 2026).
Attributes outside the conventions start with `goodput.`. No text of prompts or responses, no query
and no address of a client.
"""

from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, TraceIdRatioBased
from opentelemetry.trace import (
    SpanContext,
    SpanKind,
    StatusCode,
    format_span_id,
    format_trace_id,
    get_current_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.span import TraceState

from agent import __version__
from agent.analysis.genai import error_type
from agent.catalog.genai import DEFAULT_PROVIDER, operation
from agent.catalog.spans import PROXIED_VALUE, PROXY_KEY, UNSAMPLED_VALUE
from agent.records.request import FAILED, RequestRecord
from agent.sources.proxy.exchange import RawHeaders

Value = str | float | int | bool | tuple[str, ...]

# The version of the conventions.
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"

# What the client gets from the proxy itself if the engine gave no response.
_OWN_RESPONSES = {"unreachable": 502, "timeout": 504}
_SCHEMES = ("http", "https")

_FROM_RECORD: Mapping[str, Callable[[RequestRecord], Value | None]] = {
    "gen_ai.request.model": lambda record: record.model,
    "gen_ai.request.id": lambda record: record.request_id,
    "gen_ai.usage.input_tokens": lambda record: record.input_tokens,
    "gen_ai.usage.output_tokens": lambda record: record.output_tokens,
    "gen_ai.usage.cache_read.input_tokens": lambda record: record.cached_tokens,
    "gen_ai.usage.reasoning.output_tokens": lambda record: record.reasoning_tokens,
    "gen_ai.response.id": lambda record: record.proxied and record.proxied.response_id,
    "gen_ai.response.finish_reasons": lambda record: _reasons(record.finish_reason),
    "gen_ai.response.time_to_first_chunk": lambda record: record.ttft_s,
    "gen_ai.latency.time_to_first_token": lambda record: record.ttft_s,
    "gen_ai.latency.e2e": lambda record: record.e2e_s,
    "http.request.method": lambda record: "POST",
    "http.response.status_code": lambda record: _status_code(record),
    # Every measured path is one route.
    "http.route": lambda record: record.route,
    "url.path": lambda record: record.route,
    "error.type": lambda record: error_type(record),
    "goodput.engine": lambda record: record.engine,
    "goodput.tenant": lambda record: record.tenant,
    "goodput.status": lambda record: record.status.value,
    "goodput.time_per_output_token_s": lambda record: record.tpot_s,
    "goodput.max_gap_s": lambda record: record.max_gap_s,
    "gen_ai.request.stream": lambda record: record.proxied and record.proxied.streamed,
    "gen_ai.request.choice.count": lambda record: _several(
        record.proxied and record.proxied.choices
    ),
    "goodput.time_to_first_byte_s": lambda record: record.proxied and record.proxied.first_byte_s,
    "http.request.body.size": lambda record: record.proxied and record.proxied.input_bytes,
    "http.response.body.size": lambda record: record.proxied and record.proxied.output_bytes,
}


def attributes_of(record: RequestRecord, response_model: str | None) -> dict[str, Value]:
    """Return the known attributes of a request; `response_model` is the model in the response."""
    known: dict[str, Value] = {
        "gen_ai.operation.name": operation(record.route),
        "gen_ai.provider.name": DEFAULT_PROVIDER,
    }
    for name, read in _FROM_RECORD.items():
        value = read(record)
        if value is not None:
            known[name] = value
    if response_model is not None:
        known["gen_ai.response.model"] = response_model
    return known


def server_attributes(headers: RawHeaders) -> dict[str, Value]:
    """Return the scheme, the host and the port that the client used, as far as headers show."""
    sent = dict(reversed(headers))
    scheme = _first(sent.get(b"x-forwarded-proto")).lower()
    known: dict[str, Value] = {"url.scheme": scheme if scheme in _SCHEMES else "http"}
    try:
        host = urlsplit(f"//{_first(sent.get(b'x-forwarded-host') or sent.get(b'host'))}")
        address, port = host.hostname, host.port
    except ValueError:
        return known
    if address:
        known["server.address"] = address
        if port is not None:
            known["server.port"] = port
    return known


def _first(value: bytes | None) -> str:
    """The first member of a header; every proxy adds one behind it."""
    return (value or b"").decode("latin-1").split(",")[0].strip()


def _status_code(record: RequestRecord) -> int | None:
    error = record.proxied and record.proxied.error
    own = _OWN_RESPONSES.get(error) if error else None
    return own if record.http_status is None else record.http_status


def _several(choices: int | None) -> int | None:
    return None if choices == 1 else choices


def _reasons(finish_reason: str | None) -> tuple[str, ...] | None:
    return None if finish_reason is None else tuple(finish_reason.split(","))


_W3C = TraceContextTextMapPropagator()
_RANDOM = RandomIdGenerator()
_NEW_STATE = (b"tracestate", f"{PROXY_KEY}={PROXIED_VALUE}".encode())
_CONTEXT_HEADERS = frozenset((b"traceparent", b"tracestate"))
_NANOSECONDS_PER_S = 1_000_000_000
_TRACE_ID_LOW_BITS = (1 << 64) - 1

# Over a minute of spans at the highest measured rate; the queue is emptied every few seconds.
_MAX_WAITING_SPANS = 65_536
_MAX_BATCH_SPANS = 512
# W3C Trace Context 3.3.1.1; the last member is the one to drop.
_MAX_STATE_MEMBERS = 32

# Whether a request's span is exported regardless of the ratio.
Keep = Callable[[RequestRecord], bool]


class ProxyTracing:
    """Exports the spans that clients sample; of those without a client's trace a share, and all
    that failed or that `keep` selects.

    An exchange has its ids from the begin: the record and the engine's request carry them, marked
    as sampled, because the agent needs the engine's span. The span itself is made at the end, where
    it delays no token, and only if it is exported. Not thread-safe.
    """

    def __init__(
        self,
        export: Callable[[bytes], None] | None,
        *,
        service: str,
        ratio: float = 1.0,
        client_sampling: bool = True,
        keep: Keep,
    ) -> None:
        """`export` gets OTLP protobuf bodies on a thread of the SDK; None exports nothing. Without
        `client_sampling` a client's decision is ignored."""
        self._ids = _ChosenIds()
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service}),
            sampler=ALWAYS_ON,
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        if export is not None:
            self._provider.add_span_processor(
                BatchSpanProcessor(
                    _BodyExporter(export),
                    max_queue_size=_MAX_WAITING_SPANS,
                    max_export_batch_size=_MAX_BATCH_SPANS,
                )
            )
        self._exports = export is not None
        self._tracer = self._provider.get_tracer("goodput-agent", __version__, SCHEMA_URL)
        self._bound = TraceIdRatioBased.get_bound_for_rate(ratio)
        self._client_sampling = client_sampling
        self._keep = keep
        # The span for the next client without a trace, made while no request waits for it.
        self._next: ExchangeSpan | None = None

    def begin(self, headers: RawHeaders) -> "ExchangeSpan":
        """Return the span of a request with these headers from its client."""
        context = _client_context(headers)
        client = None if context is None else get_current_span(context).get_span_context()
        if client is None:
            span, self._next = self._next or self._new_trace(), None
        elif client.is_valid:
            span = self._continued(client, context)
        else:
            # The client's state is that of a trace which ends here.
            span = self._new_trace()
        span.request_headers = headers
        return span

    def _continued(self, client: SpanContext, context: Context | None) -> "ExchangeSpan":
        span = ExchangeSpan(self, client.trace_id, _RANDOM.generate_span_id(), context)
        state = client.trace_state
        if self._client_sampling:
            span.sampled = client.trace_flags.sampled and state.get(PROXY_KEY) != UNSAMPLED_VALUE
        marked = _marked(state, UNSAMPLED_VALUE if span.sampled is False else PROXIED_VALUE)
        span.headers = (span.headers[0], (b"tracestate", marked.to_header().encode()))
        return span

    def _new_trace(self) -> "ExchangeSpan":
        return ExchangeSpan(self, _RANDOM.generate_trace_id(), _RANDOM.generate_span_id(), None)

    def record(
        self, exchange: "ExchangeSpan", record: RequestRecord, response_model: str | None
    ) -> None:
        """Make and export the span of an ended exchange, if it is selected."""
        self._next = self._next or self._new_trace()
        if not self._exports or not self._selected(exchange, record):
            return
        self._ids.trace_id, self._ids.span_id = exchange.number, int(exchange.span_id, 16)
        span = self._tracer.start_span(
            f"{operation(record.route)} {record.model or ''}".strip(),
            exchange.context or Context(),
            SpanKind.SERVER,
            attributes={
                **server_attributes(exchange.request_headers),
                **attributes_of(record, response_model),
            },
            start_time=_ns(record.started_at),
        )
        if record.ttft_s is not None:
            span.add_event("first_token", timestamp=_ns(record.started_at + record.ttft_s))
        if error_type(record) is not None:
            span.set_status(StatusCode.ERROR)
        span.end(end_time=_ns(record.ended_at))

    def close(self) -> None:
        """Export the queued spans."""
        self._provider.shutdown()

    def _selected(self, exchange: "ExchangeSpan", record: RequestRecord) -> bool:
        if exchange.sampled is not None:
            return exchange.sampled
        in_share = (exchange.number & _TRACE_ID_LOW_BITS) < self._bound
        return in_share or record.status in FAILED or self._keep(record)


class ExchangeSpan:
    """The span of one exchange; ids in lower-case hex, `number` is the trace id as an integer.

    `sampled` is the client's decision, None if it made none or it is ignored.
    """

    __slots__ = (
        "_tracing",
        "context",
        "headers",
        "number",
        "request_headers",
        "sampled",
        "span_id",
        "trace_id",
    )

    def __init__(
        self,
        tracing: ProxyTracing,
        trace_id: int,
        span_id: int,
        context: Context | None,
    ) -> None:
        self.trace_id = format_trace_id(trace_id)
        self.span_id = format_span_id(span_id)
        parent = f"00-{self.trace_id}-{self.span_id}-01"
        self.headers: RawHeaders = ((b"traceparent", parent.encode()), _NEW_STATE)
        self.number = trace_id
        self.context = context
        self.request_headers: RawHeaders = ()
        self.sampled: bool | None = None
        self._tracing = tracing

    def end(self, record: RequestRecord, response_model: str | None) -> None:
        """End the span with the fields of the record, and the model in the response."""
        self._tracing.record(self, record, response_model)


class _ChosenIds(IdGenerator):
    """Gives the next span the ids of its exchange."""

    trace_id = 0
    span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _BodyExporter(SpanExporter):
    def __init__(self, export: Callable[[bytes], None]) -> None:
        self._export = export

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._export(encode_spans(spans).SerializeToString())
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Do nothing: no span is held."""


def _client_context(headers: RawHeaders) -> Context | None:
    """Return the trace context that the client sent, None without one."""
    sent = [line for line in headers if line[0] in _CONTEXT_HEADERS]
    if not sent:
        return None
    carrier = {name.decode(): value.decode("latin-1") for name, value in sent}
    states = [value.decode("latin-1") for name, value in sent if name == b"tracestate"]
    # W3C Trace Context 3.3.1: several lines are one list.
    if states:
        carrier["tracestate"] = ",".join(states)
    # An empty context, not this thread's current one.
    return _W3C.extract(carrier, Context())


def _marked(state: TraceState, value: str) -> TraceState:
    """The client's trace state, marked for the engine."""
    others = [member for member in state.items() if member[0] != PROXY_KEY]
    return TraceState([(PROXY_KEY, value), *others][:_MAX_STATE_MEMBERS])


def _ns(at: float) -> int:
    return round(at * _NANOSECONDS_PER_S)
