"""Spans that continue the client's trace, and that the engine's span continues."""

from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, format_span_id, format_trace_id
from opentelemetry.trace.propagation import set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agent.records.request import RequestRecord
from agent.sources.proxy.exchange import RawHeaders
from agent.sources.proxy.tracing.attributes import FAILED, attributes_of, error_type, operation

_W3C = TraceContextTextMapPropagator()
_CONTEXT_HEADERS = frozenset((b"traceparent", b"tracestate"))
_NANOSECONDS_PER_S = 1_000_000_000
_TRACE_ID_LOW_BITS = (1 << 64) - 1

# More than a minute of the fastest proxy: the queue is emptied every few seconds.
_MAX_WAITING_SPANS = 65_536
_MAX_BATCH_SPANS = 512

# Says whether a request deserves its span whatever the ratio.
Keep = Callable[[RequestRecord], bool]


class ProxyTracing:
    """Makes a span of each exchange and exports a share of them, and all that `keep` wants.

    A span is always made, for its ids are the record's, and is marked as sampled for the engine:
    whether it is worth keeping is only known at its end.
    """

    def __init__(
        self,
        export: Callable[[bytes], None] | None,
        *,
        service: str,
        ratio: float = 1.0,
        keep: Keep,
    ) -> None:
        """`export` takes OTLP protobuf bodies, in a thread of its own; None exports nothing."""
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service}),
            sampler=ALWAYS_ON,
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
        self._tracer = self._provider.get_tracer("goodput-agent")
        self._bound = TraceIdRatioBased.get_bound_for_rate(ratio)
        self._keep = keep

    def begin(self, headers: RawHeaders, at: float) -> "ExchangeSpan":
        """The span of a request with these headers from its client, begun at a Unix time."""
        span = self._tracer.start_span(
            "llm_proxy", _context(headers), SpanKind.SERVER, start_time=_ns(at)
        )
        return ExchangeSpan(span, self._worth_keeping)

    def close(self) -> None:
        """Export what waits."""
        self._provider.shutdown()

    def _worth_keeping(self, trace_id: int, record: RequestRecord) -> bool:
        sampled = (trace_id & _TRACE_ID_LOW_BITS) < self._bound
        return sampled or record.status in FAILED or self._keep(record)


class ExchangeSpan:
    """The span of one exchange; ids in lower-case hex."""

    def __init__(self, span: Span, wanted: Callable[[int, RequestRecord], bool]) -> None:
        context = span.get_span_context()
        self.trace_id = format_trace_id(context.trace_id)
        self.span_id = format_span_id(context.span_id)
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, set_span_in_context(span, Context()))
        self.headers: RawHeaders = [
            (name.encode(), value.encode()) for name, value in carrier.items()
        ]
        self._span = span
        self._number = context.trace_id
        self._wanted = wanted

    def end(self, record: RequestRecord) -> None:
        """Say what the record says, and export the span if it is worth keeping."""
        if not self._wanted(self._number, record):
            # A span that never ends is never exported.
            return
        span = self._span
        span.update_name(f"{operation(record.route)} {record.model or ''}".strip())
        span.set_attributes(attributes_of(record))
        if record.ttft_s is not None:
            span.add_event("first_token", timestamp=_ns(record.started_at + record.ttft_s))
        if record.status in FAILED:
            span.set_status(Status(StatusCode.ERROR, error_type(record)))
        span.end(end_time=_ns(record.ended_at))


class _BodyExporter(SpanExporter):
    """Turns spans into OTLP bodies, which go the way of all others."""

    def __init__(self, export: Callable[[bytes], None]) -> None:
        self._export = export

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._export(encode_spans(spans).SerializeToString())
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is held."""


def _context(headers: RawHeaders) -> Context:
    carrier = {
        name.decode(): value.decode("latin-1")
        for name, value in headers
        if name in _CONTEXT_HEADERS
    }
    # An empty context, not the current one: this thread's own trace is none of the client's.
    return _W3C.extract(carrier, Context()) if carrier else Context()


def _ns(at: float) -> int:
    return round(at * _NANOSECONDS_PER_S)
