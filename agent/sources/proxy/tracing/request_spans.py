"""Makes the span of each exchange: a child of the client's span, the parent of the engine's."""

from collections.abc import Callable, Sequence

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
    Status,
    StatusCode,
    format_span_id,
    format_trace_id,
    get_current_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.span import TraceState

from agent import __version__
from agent.catalog.spans import UNSAMPLED_KEY, UNSAMPLED_VALUE
from agent.records.request import FAILED, RequestRecord
from agent.sources.proxy.exchange import RawHeaders
from agent.sources.proxy.tracing.span_attributes import (
    SCHEMA_URL,
    attributes_of,
    error_type,
    operation,
    server_attributes,
)

_W3C = TraceContextTextMapPropagator()
_RANDOM = RandomIdGenerator()
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
            span = self._new_trace()
            # The client's state is that of a trace which ends here.
            span.headers = (*span.headers, (b"tracestate", b""))
        span.request_headers = headers
        return span

    def _continued(self, client: SpanContext, context: Context | None) -> "ExchangeSpan":
        span = ExchangeSpan(self, client.trace_id, _RANDOM.generate_span_id(), context)
        state = client.trace_state
        if self._client_sampling:
            span.sampled = client.trace_flags.sampled and state.get(UNSAMPLED_KEY) != (
                UNSAMPLED_VALUE
            )
            state = state if span.sampled else _unsampled(state)
        span.headers = (*span.headers, (b"tracestate", state.to_header().encode()))
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
            span.set_status(Status(StatusCode.ERROR))
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
        self.headers: RawHeaders = ((b"traceparent", parent.encode()),)
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
    """Encodes spans as OTLP bodies."""

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


def _unsampled(state: TraceState) -> TraceState:
    """The client's trace state, marked for the engine's span."""
    others = [member for member in state.items() if member[0] != UNSAMPLED_KEY]
    return TraceState([(UNSAMPLED_KEY, UNSAMPLED_VALUE), *others][:_MAX_STATE_MEMBERS])


def _ns(at: float) -> int:
    return round(at * _NANOSECONDS_PER_S)
