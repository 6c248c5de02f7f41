"""Reads an engine's request spans as request records."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.proto.trace.v1.trace_pb2 import Status as SpanStatus

from agent.analysis.latency import ReportedPhases, screen, tpot_s
from agent.catalog.reasons import SpanRejected, ValueDropped
from agent.catalog.spans import (
    ENGINE_KEY_PREFIX,
    ENGINE_SCOPES,
    PHASE_SPAN_PREFIX,
    PREFILL_SPAN_PREFIX,
    REQUEST_ATTRIBUTES,
    REQUEST_SPAN_NAME,
    ValueType,
)
from agent.catalog.start_phases import PHASE_OF_SPAN
from agent.records.engine import EngineIdentity, LoadingSpan
from agent.records.request import RequestRecord, Status, Vantage
from agent.sources.otlp.router_spans import RoutedRequest, routed_request

# (field, reason) of each refused value.
Findings = Counter[tuple[str, str]]

Identify = Callable[[Mapping[str, object]], EngineIdentity]

# No span ends after its receipt: the sender's clock is ahead by the rest. Less is not reported,
# since clocks that are kept in step differ by it.
MAX_CLOCK_LEAD_S = 1.0
# Older spans can be late deliveries, so they are stored as they are and only counted.
LATE_AFTER_S = 3600.0

_NANOSECONDS = 1e-9

# Of a trace and of its span.
_Ids = tuple[bytes, bytes]

# Invalid by the protocol: all spans of a sender without ids would seem to be one.
_NO_TRACE_ID = bytes(16)
_NO_SPAN_ID = bytes(8)


@dataclass(slots=True)
class ExportContent:
    """The records of one export, its other spans, and refused spans and values by reason.

    Spans of a start are `loading`, and among the `passed` ones.
    """

    records: list[RequestRecord] = field(default_factory=list)
    loading: list[LoadingSpan] = field(default_factory=list)
    passed: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    screened: Findings = field(default_factory=Counter)

    @property
    def rejected_spans(self) -> int:
        """How many spans were refused."""
        return sum(self.rejected.values())

    @property
    def readable_spans(self) -> int:
        """How many spans were read."""
        return len(self.records) + self.passed


@dataclass(frozen=True, slots=True)
class _Origin:
    """The fields that all spans of one resource share."""

    engine: str | None
    model: str | None
    service_name: str | None
    agent: str
    received_at: float


class SpanReader:
    """Reads exports. `identify` finds the engine of a resource; `agent` is this agent's name."""

    def __init__(self, identify: Identify, agent: str) -> None:
        self._identify = identify
        self._agent = agent

    def read(self, request: ExportTraceServiceRequest, received_at: float) -> ExportContent:
        """The content of an export. Spans of no engine are only counted, bad ones are refused."""
        content = ExportContent()
        for resource_spans in request.resource_spans:
            origin: _Origin | None = None
            for scope_spans in resource_spans.scope_spans:
                scope = scope_spans.scope.name
                for span in scope_spans.spans:
                    trace_id, span_id = span.trace_id, span.span_id
                    if len(trace_id) != 16 or len(span_id) != 8:
                        content.rejected[SpanRejected.ID_LENGTH] += 1
                    elif trace_id == _NO_TRACE_ID or span_id == _NO_SPAN_ID:
                        content.rejected[SpanRejected.ID_ZERO] += 1
                    else:
                        is_engines = _is_engine_request(scope, span)
                        routed = None if is_engines else routed_request(span)
                        if not is_engines and routed is None:
                            self._pass(scope, span, resource_spans.resource, content)
                            continue
                        if origin is None:
                            origin = self._origin(
                                resource_spans.resource, received_at, content.screened
                            )
                        _take(span, (trace_id, span_id), origin, content, routed)
        return content

    def _pass(self, scope: str, span: Span, resource: Resource, content: ExportContent) -> None:
        """Count a span that is of no request, and keep it if an engine sent it while it loaded."""
        content.passed += 1
        if span.name not in PHASE_OF_SPAN or not scope.startswith(ENGINE_SCOPES):
            return
        engine = self._identify(
            {pair.key: plain(pair.value) for pair in resource.attributes}
        ).engine
        if engine is not None:
            began_at, ended_at = span.start_time_unix_nano, span.end_time_unix_nano
            times = began_at * _NANOSECONDS, ended_at * _NANOSECONDS
            content.loading.append(LoadingSpan(engine, span.name, *times))

    def _origin(self, resource: Resource, received_at: float, refused: Findings) -> _Origin:
        attributes = {pair.key: plain(pair.value) for pair in resource.attributes}
        identity = self._identify(attributes)
        return _Origin(
            _name("engine", identity.engine, refused),
            _name("model", identity.model, refused),
            _name("service_name", attributes.get("service.name"), refused),
            self._agent,
            received_at,
        )


def _name(field_name: str, text: object, refused: Findings) -> str | None:
    name: str | None
    name, reason = name_or_none(text)
    if reason is not None:
        refused[field_name, reason] += 1
    return name


def _is_engine_request(scope: str, span: Span) -> bool:
    """Whether an engine sent this span of a request; `scope` names the library that made it.

    Clients use the name of vLLM's span, too, and proxies its keys. What another library made must
    have all that an engine's span has, as TensorRT-LLM's does.
    """
    if span.name.startswith(PHASE_SPAN_PREFIX):
        return False
    named = span.name == REQUEST_SPAN_NAME
    measured = any(pair.key.startswith(ENGINE_KEY_PREFIX) for pair in span.attributes)
    if scope.startswith(ENGINE_SCOPES):
        return named or measured
    serves = span.kind == Span.SPAN_KIND_SERVER
    return named and (measured and serves if scope else measured or serves)


def _take(
    span: Span,
    ids: _Ids,
    origin: _Origin,
    content: ExportContent,
    routed: RoutedRequest | None,
) -> None:
    if span.end_time_unix_nano < span.start_time_unix_nano or not span.start_time_unix_nano:
        content.rejected[SpanRejected.SPAN_TIMES] += 1
        return
    if routed is None:
        record = _record(span, ids, origin, content.screened)
    else:
        record = _router_record(span, ids, origin, routed, content.screened)
    content.records.append(record)


def _record(span: Span, ids: _Ids, origin: _Origin, refused: Findings) -> RequestRecord:
    values = request_attributes(span, refused)
    get = values.get
    screened = screen(ReportedPhases(*[get(name) for name in ReportedPhases._fields]))
    for finding in screened.findings:
        refused[finding] += 1
    phases = screened.phases
    started_at, ended_at, skew_s = _times(span, origin.received_at, phases.e2e_s, refused)
    failed = screened.ended_before_first_token or span.status.code == SpanStatus.STATUS_CODE_ERROR
    return RequestRecord(
        trace_id=ids[0].hex(),
        span_id=ids[1].hex(),
        vantage=Vantage.ENGINE,
        status=Status.ERROR if failed else Status.OK,
        started_at=started_at,
        ended_at=ended_at,
        received_at=origin.received_at,
        clock_skew_s=skew_s,
        request_id=get("request_id"),
        agent=origin.agent,
        engine=origin.engine,
        model=get("model") or origin.model,
        service_name=origin.service_name,
        ttft_s=phases.ttft_s,
        tpot_s=tpot_s(phases.decode_s, phases.output_tokens),
        e2e_s=phases.e2e_s,
        queue_s=phases.queue_s,
        prefill_s=phases.prefill_s,
        decode_s=phases.decode_s,
        input_tokens=phases.input_tokens,
        output_tokens=phases.output_tokens,
        parent_span_id=_parent(span.parent_span_id, refused),
        hop=span.name.startswith(PREFILL_SPAN_PREFIX) or None,
        **_extras(values, phases, refused),
    )


def _router_record(
    span: Span, ids: _Ids, origin: _Origin, routed: RoutedRequest, refused: Findings
) -> RequestRecord:
    """A router's view, which has no engine and no time to a token."""
    length_s = (span.end_time_unix_nano - span.start_time_unix_nano) * _NANOSECONDS
    started_at, ended_at, skew_s = _times(span, origin.received_at, length_s, refused)
    return RequestRecord(
        trace_id=ids[0].hex(),
        span_id=ids[1].hex(),
        vantage=Vantage.ROUTER,
        status=routed.status,
        started_at=started_at,
        ended_at=ended_at,
        received_at=origin.received_at,
        clock_skew_s=skew_s,
        agent=origin.agent,
        model=_name("model", routed.model, refused),
        service_name=origin.service_name,
        route=routed.route,
        http_status=routed.http_status,
        parent_span_id=_parent(span.parent_span_id, refused),
    )


def _parent(span_id: bytes, refused: Findings) -> str | None:
    if not span_id or span_id == _NO_SPAN_ID:
        return None
    if len(span_id) != 8:
        refused["parent_span_id", ValueDropped.ID_LENGTH] += 1
        return None
    return span_id.hex()


# Fields that `_record` reads by name. Every other attribute of the catalogue goes to its field.
_COMMON = frozenset((*ReportedPhases._fields, "request_id", "model"))
_NO_EXTRAS: dict[str, Any] = {}


def _extras(values: Mapping[str, Any], phases: ReportedPhases, refused: Findings) -> dict[str, Any]:
    """The fields that only some engines send."""
    if values.keys() <= _COMMON:
        return _NO_EXTRAS
    extras = {name: value for name, value in values.items() if name not in _COMMON}
    for name, whole in (
        ("cached_tokens", phases.input_tokens),
        ("reasoning_tokens", phases.output_tokens),
    ):
        if name in extras:
            extras[name] = _part(name, extras[name], whole, refused)
    if "finish_reason" in extras:
        extras["finish_reason"] = _finish_reason(extras["finish_reason"], refused)
    return extras


def _times(
    span: Span, received_at: float, e2e_s: float | None, refused: Findings
) -> tuple[float, float, float | None]:
    """(started_at, ended_at, clock skew): moved to the receipt if the sender's clock is ahead."""
    started_at = span.start_time_unix_nano * _NANOSECONDS
    ended_at = span.end_time_unix_nano * _NANOSECONDS
    lead_s = ended_at - received_at
    if lead_s > MAX_CLOCK_LEAD_S:
        refused["started_at", ValueDropped.CLOCK_AHEAD] += 1
        return received_at - (e2e_s or 0.0), received_at, lead_s
    if lead_s > 0.0:
        return started_at - lead_s, received_at, None
    if lead_s < -LATE_AFTER_S:
        refused["started_at", ValueDropped.LATE] += 1
    return started_at, ended_at, None


def _part(name: str, part: int | None, whole: int | None, refused: Findings) -> int | None:
    """A part of other tokens; None and counted if it is larger than these or negative."""
    if part is None:
        return None
    if part < 0 or whole is None or part > whole:
        why = ValueDropped.NEGATIVE if part < 0 else ValueDropped.MORE_THAN_WHOLE
        refused[name, why] += 1
        return None
    return part


def _finish_reason(reason: str | None, refused: Findings) -> str | None:
    if reason is None or len(reason) <= 64:
        return reason
    refused["finish_reason", ValueDropped.TOO_LONG] += 1
    return None


# Attributes: a fast path reads the usual ones

MAX_TEXT_CHARACTERS = 256

# A value or None, and the reason of a refusal.
ValueOrReason = tuple[Any, str | None]


def plain(value: AnyValue) -> object:
    """The attribute's value as a Python scalar; None for lists, maps, bytes and nothing."""
    which = value.WhichOneof("value")
    return getattr(value, which) if which in _SCALARS else None


_SCALARS = frozenset(("string_value", "bool_value", "int_value", "double_value"))


def request_attributes(span: Span, refused: Counter[tuple[str, str]]) -> dict[str, Any]:
    """The wanted attributes by our field names; of two spellings, the one with the lower rank."""
    values = _usual_attributes(span)
    return _any_attributes(span, refused) if values is None else values


_SLOTS = {
    ValueType.SECONDS: "double_value",
    ValueType.COUNT: "int_value",
    ValueType.TEXT: "string_value",
}
_USUAL = {key: (name, _SLOTS[kind]) for key, (name, kind, _) in REQUEST_ATTRIBUTES.items()}


def _usual_attributes(span: Span) -> dict[str, Any] | None:
    """The wanted attributes if each occurs once, in the usual type and not zero; else None.

    Nearly every span is so, and asking for the type of a value costs more than reading it.
    """
    values: dict[str, Any] = {}
    usual = _USUAL.get
    for pair in span.attributes:
        found = usual(pair.key)
        if found is not None:
            name, slot = found
            value = getattr(pair.value, slot)
            if not value or name in values or (slot == "string_value" and not usable(value)):
                return None
            values[name] = value
    return values


def usable(text: str) -> bool:
    """Whether a database can store the text: PostgreSQL takes no NUL, and names are short."""
    return len(text) <= MAX_TEXT_CHARACTERS and "\0" not in text


def name_or_none(text: object) -> ValueOrReason:
    """A name that a database can store, or None and a reason; an empty name is unknown."""
    if text is None:
        return None, None
    if not isinstance(text, str):
        return None, ValueDropped.WRONG_TYPE
    if not usable(text):
        return None, ValueDropped.CONTROL_CHARACTER if "\0" in text else ValueDropped.TOO_LONG
    return text or None, None


def _any_attributes(span: Span, refused: Counter[tuple[str, str]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    ranks: dict[str, int] = {}
    wanted = REQUEST_ATTRIBUTES
    for pair in span.attributes:
        found = wanted.get(pair.key)
        if found is None:
            continue
        name, kind, rank = found
        if rank > ranks.get(name, rank):
            continue
        value, reason = _READERS[kind](pair.value)
        if reason is not None:
            refused[name, reason] += 1
        elif value is not None:
            values[name] = value
            ranks[name] = rank
    return values


def _read_seconds(value: AnyValue) -> ValueOrReason:
    which = value.WhichOneof("value")
    if which == "double_value":
        return value.double_value, None
    if which == "int_value":
        return float(value.int_value), None
    return None, ValueDropped.WRONG_TYPE


def _read_count(value: AnyValue) -> ValueOrReason:
    which = value.WhichOneof("value")
    if which == "int_value":
        return value.int_value, None
    if which == "double_value" and value.double_value.is_integer():
        return int(value.double_value), None
    return None, ValueDropped.WRONG_TYPE


def _read_text(value: AnyValue) -> ValueOrReason:
    which = value.WhichOneof("value")
    if which == "array_value" and len(value.array_value.values) == 1:
        return _read_text(value.array_value.values[0])
    if which != "string_value":
        return None, ValueDropped.WRONG_TYPE
    return name_or_none(value.string_value)


_READERS: Mapping[ValueType, Callable[[AnyValue], ValueOrReason]] = {
    ValueType.SECONDS: _read_seconds,
    ValueType.COUNT: _read_count,
    ValueType.TEXT: _read_text,
}
