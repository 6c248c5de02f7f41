"""Measures one exchange and makes its record."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agent.catalog.reasons import ProxyFailure
from agent.records.request import ProxyView, RequestRecord, Status, Vantage, status_of
from agent.sources.proxy.exchange import (
    Arrival,
    Ending,
    OnFailure,
    RawHeaders,
    RequestSpan,
    Tracing,
)
from agent.sources.proxy.measuring.api_protocols import PROTOCOLS, ApiProtocol
from agent.sources.proxy.measuring.json_values import short_text
from agent.sources.proxy.measuring.parsed_event import TokenUsage, with_engine_times
from agent.sources.proxy.measuring.request_fields import (
    REQUEST_ID,
    UNKNOWN,
    DeferredMedia,
    RequestFields,
    by_name,
    client_name,
    limit_s,
    priority_header,
    read_request_fields,
    request_id_of,
    tenant_of,
)
from agent.sources.proxy.measuring.response_readers import (
    PassThroughReader,
    ResponseFindings,
    ResponseReader,
    WholeBodyReader,
)
from agent.sources.proxy.measuring.stream_reader import StreamReader, UsageStripper


class RequestOutcome(NamedTuple):
    """How a request ended; `error` is a short code, None if nothing failed."""

    status: Status
    error: str | None


_OK = RequestOutcome(Status.OK, None)
_UNFINISHED = RequestOutcome(Status.ERROR, "unfinished")
_ENDINGS: Mapping[Ending, RequestOutcome] = {
    Ending.CLIENT_GONE: RequestOutcome(Status.CANCELLED, "client_gone"),
    Ending.ENGINE_GONE: RequestOutcome(Status.ERROR, "engine_gone"),
    Ending.UNREACHABLE: RequestOutcome(Status.ERROR, "unreachable"),
    Ending.TIMEOUT: RequestOutcome(Status.TIMEOUT, "timeout"),
    Ending.REFUSED: RequestOutcome(Status.ERROR, "refused"),
}
# The engine gave the request up: vLLM does so when it is stopped or paused.
_GIVEN_UP = ("abort", "error")
_SERVER_ERROR = 500


def outcome_of(
    ending: Ending, http_status: int | None, findings: ResponseFindings, *, streamed: bool
) -> RequestOutcome:
    """Return the outcome of an exchange.

    An error in the response wins over the ending, and counts as the HTTP status that it stands for.
    So does a finish reason which says that the engine gave the request up: it failed. A client that
    leaves after the end of the stream got the whole response. A stream that stops without a finish
    reason failed.
    """
    if findings.error is not None:
        return RequestOutcome(status_of(findings.error.http_status), findings.error.code)
    if http_status is not None and http_status >= 300:
        return RequestOutcome(status_of(http_status), f"http_{http_status}")
    for reason in _GIVEN_UP:
        if reason in findings.finish_reasons:
            return RequestOutcome(Status.ERROR, reason)
    if findings.done:
        return _OK
    if ending is not Ending.COMPLETE:
        return _ENDINGS[ending]
    return _UNFINISHED if streamed and not findings.finish_reasons else _OK


def error_status(findings: ResponseFindings) -> int | None:
    """Return the HTTP status that an error in a response 200 stands for; None without one.

    vLLM reports what went wrong after the head as an event of the stream.
    """
    if findings.error is not None:
        return findings.error.http_status
    given_up = any(reason in findings.finish_reasons for reason in _GIVEN_UP)
    return _SERVER_ERROR if given_up else None


# In place of a tenant that was not read yet.
_UNREAD = ""

# Shared by all exchanges: a pass-through reader never changes its findings.
_PASS_THROUGH = PassThroughReader()
_IDENTITY = (b"accept-encoding", b"identity")


class ClientHeaders(NamedTuple):
    """The configured headers that say whom a request is for, in lower case."""

    tenant: bytes | None
    user: bytes | None
    workload: bytes | None
    session: bytes | None


class MeasuringContext(NamedTuple):
    """What all exchanges share."""

    agent: str
    names_in: ClientHeaders
    returns_request_id: bool
    # Gets each record from `ended`; None where the caller asks for it by `record`.
    sink: Callable[[RequestRecord], None] | None
    # Gets the record of a request that was sent to an engine, as it is stored if this process dies.
    opened: Callable[[RequestRecord], None] | None
    # Gets the span id of a request that ended without a record.
    lost: Callable[[str], None] | None
    on_failure: OnFailure


class MeasuredExchange:
    """Measures one exchange while its response passes; `ended` hands the record to the sink.

    `parent_span_id` is that of the client's span, and None if spans have it.
    """

    __slots__ = (
        "_at",
        "_at_s",
        "_client_headers",
        "_context",
        "_ended",
        "_engine",
        "_fields",
        "_first_byte_at_s",
        "_http_status",
        "_input_bytes",
        "_media",
        "_output_bytes",
        "_prepared",
        "_protocol",
        "_reader",
        "_request_id",
        "_route",
        "_span",
        "_streamed",
        "_strips_usage",
        "_tenant",
        "added_headers",
        "body",
        "error_status",
        "headers",
        "model",
        "parent_span_id",
    )

    def __init__(
        self,
        *,
        context: MeasuringContext,
        arrival: Arrival,
        protocol: ApiProtocol,
        fields: RequestFields,
        span: RequestSpan,
    ) -> None:
        self.error_status: int | None = None
        self.parent_span_id: str | None = None
        self.body = fields.body
        self.model = fields.model
        self._client_headers = by_name(arrival.headers)
        self._tenant: str | None = _UNREAD
        client_id = request_id_of(self._client_headers)
        self._request_id: str | None = client_id or span.span_id
        own_id = (REQUEST_ID, span.span_id.encode())
        # What a client sends passes unchanged, also if the row cannot have it.
        sent_id = [] if self._client_headers.get(REQUEST_ID) else [own_id]
        returned = context.returns_request_id and client_id is None
        self.added_headers: RawHeaders = (own_id,) if returned else ()
        # Added usage cannot be stripped from a compressed response.
        self._strips_usage = fields.final_usage_added or fields.chunk_usage_added
        encoding = [_IDENTITY] * self._strips_usage
        self.headers: RawHeaders = [*span.headers, *sent_id, *encoding]
        self._context, self._span = context, span
        self._protocol, self._route = protocol, arrival.path
        self._fields = fields
        self._at, self._at_s = arrival.at, arrival.at_s
        self._input_bytes = 0 if arrival.body is None else len(arrival.body)
        self._output_bytes = 0
        self._media = DeferredMedia(None if fields is UNKNOWN else arrival.body)
        self._engine: str | None = None
        self._http_status: int | None = None
        self._first_byte_at_s: float | None = None
        self._streamed = fields.streamed
        self._reader: ResponseReader = _PASS_THROUGH
        self._prepared: StreamReader | None = None
        self._ended = False

    def sent(self, size_bytes: int) -> None:
        """Count bytes of an unbuffered request body that went to the engine."""
        self._input_bytes += size_bytes

    def routed(self, engine: str) -> None:
        """Note the engine that is tried now; the last one counts, also if it is gone."""
        self._engine = engine

    def answered(self, status: int, headers: RawHeaders, at_s: float) -> RawHeaders:
        """Choose the reader of the response; return the headers for the client."""
        self._http_status = status
        if status != 200:
            return headers
        values = by_name(headers)
        streamed = values.get(b"content-type", b"").lower().startswith(b"text/event-stream")
        self._streamed = streamed
        if (values.get(b"content-encoding") or b"identity").lower() != b"identity":
            self._context.on_failure(ProxyFailure.COMPRESSED_ANSWER)
            return headers
        if not streamed:
            self._reader = WholeBodyReader(self._protocol)
            return headers
        self._reader = self._prepared or self._stream_reader()
        if not self._strips_usage:
            return headers
        return [line for line in headers if line[0] != b"content-length"]

    def chunk(self, data: bytes, at_s: float) -> bytes:
        """Read a piece of the response's body; return the bytes to send to the client now."""
        if self._first_byte_at_s is None and data:
            self._first_byte_at_s = at_s
        try:
            kept = self._reader.take(data, at_s)
        except Exception:
            # A fault in measuring must not cost the client any bytes.
            kept = self._stop_reading() + data
        self._output_bytes += len(kept)
        return kept

    def passes(self, data: bytes) -> bool:
        """Whether the client gets these bytes unchanged, and no others if they are the last."""
        return not isinstance(self._reader, StreamReader) or self._reader.passes(data)

    def chunks(self, pieces: Sequence[bytes], times_s: Sequence[float]) -> None:
        """Read pieces of a response that passes unchanged and that the client has already."""
        if self._first_byte_at_s is None:
            self._first_byte_at_s = times_s[0]
        self._output_bytes += sum(map(len, pieces))
        try:
            self._reader.take_all(pieces, times_s)
        except Exception:
            self._stop_reading()

    def catch_up(self) -> None:
        """Keep what is known of the request, but its body; prepare the reader of the response,
        unless it has begun, and read the media."""
        if self._fields.body is not None:
            self._fields = self._fields._replace(body=None)
        if self._context.opened is not None and not self._ended:
            self._context.opened(self.open_record())
        if self._http_status is None and self._streamed:
            self._prepared = self._stream_reader()
        self._media.read()

    @property
    def has_head(self) -> bool:
        """Whether the response has begun."""
        return self._http_status is not None

    def ended(self, ending: Ending, at_s: float) -> bytes:
        """Make the record and end the span; return the last bytes for the client."""
        kept = self.finish(at_s)
        try:
            record = self.record(ending, at_s)
            self._span.end(record, self._reader.findings.model)
            if self._context.sink is not None:
                self._context.sink(record)
        except Exception:
            if self._context.lost is not None:
                self._context.lost(self._span.span_id)
            self._context.on_failure(ProxyFailure.RECORD)
        return kept

    def finish(self, at_s: float) -> bytes:
        """Read the end of the response; return the last bytes for the client."""
        self._ended = True
        try:
            kept = self._reader.finish(at_s)
        except Exception:
            kept = self._stop_reading()
        self._output_bytes += len(kept)
        return kept

    @property
    def tenant(self) -> str | None:
        """Whom the request is for."""
        if self._tenant == _UNREAD:
            self._tenant = tenant_of(self._client_headers, self._context.names_in.tenant)
        return self._tenant

    def identified(self, engine_id: str | None) -> None:
        """Take the engine's id of a request that has none of its client."""
        if self._request_id == self._span.span_id:
            self._request_id = short_text(engine_id)

    def counted(self, usage: TokenUsage) -> None:
        """Take counts that the engine did not send to the client; those of the response win."""
        if self._reader is not _PASS_THROUGH:
            findings = self._reader.findings
            findings.usage = usage.updated(findings.usage)

    def record(self, ending: Ending, at_s: float) -> RequestRecord:
        """Return the record of the exchange, which has ended."""
        return self._with_engine_times(self._record(ending, at_s))

    def open_record(self, error: str = ProxyFailure.WORKER_DIED) -> RequestRecord:
        """Return the record that the request has if this process dies."""
        fields, headers, names_in = self._fields, self._client_headers, self._context.names_in
        return RequestRecord(
            trace_id=self._span.trace_id,
            span_id=self._span.span_id,
            vantage=Vantage.PROXY,
            status=Status.ERROR,
            started_at=self._at,
            ended_at=self._at,
            received_at=self._at,
            request_id=self._request_id,
            agent=self._context.agent,
            engine=self._engine,
            model=self.model,
            tenant=self.tenant,
            route=self._route,
            parent_span_id=self.parent_span_id,
            proxied=ProxyView(
                input_bytes=self._input_bytes,
                error=error,
                choices=fields.choices,
                streamed=fields.streamed,
                priority=fields.priority,
                end_user=client_name(headers, names_in.user),
                workload=client_name(headers, names_in.workload),
                session=client_name(headers, names_in.session) or fields.session,
            ),
        )

    def _stream_reader(self) -> StreamReader:
        fields = self._fields
        stripper = None
        if self._strips_usage:
            stripper = UsageStripper(final=fields.final_usage_added, each=fields.chunk_usage_added)
        return StreamReader(self._protocol, stripper, choices=fields.choices or 1)

    def _stop_reading(self) -> bytes:
        """Pass on the rest unread; return the bytes that the client did not get yet."""
        self._context.on_failure(ProxyFailure.MEASURING)
        unsent = self._reader.unsent
        self._reader = PassThroughReader(self._reader.findings)
        return unsent

    def _record(self, ending: Ending, at_s: float) -> RequestRecord:
        findings = self._reader.findings
        if findings.missed is not None:
            self._context.on_failure(findings.missed)
        streamed = isinstance(self._reader, StreamReader)
        outcome = outcome_of(ending, self._http_status, findings, streamed=streamed)
        self.error_status = error_status(findings)
        timing, usage = findings.timing, findings.usage.possible()
        if usage != findings.usage:
            self._context.on_failure(ProxyFailure.USAGE)
        output_tokens = self._output_tokens(outcome)
        ended_at = self._at + (at_s - self._at_s)
        return RequestRecord(
            trace_id=self._span.trace_id,
            span_id=self._span.span_id,
            vantage=Vantage.PROXY,
            status=outcome.status,
            started_at=self._at,
            ended_at=ended_at,
            received_at=ended_at,
            request_id=self._request_id,
            agent=self._context.agent,
            engine=self._engine,
            # Of a body that was not read, the response has it.
            model=self.model or findings.model,
            tenant=self.tenant,
            route=self._route,
            ttft_s=self._since_arrival(timing.first_s),
            tpot_s=self._tpot_s(output_tokens, usage.reasoning_tokens),
            e2e_s=at_s - self._at_s,
            max_gap_s=None if self._several_choices else timing.max_gap_s,
            input_tokens=usage.input_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=output_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            finish_reason=findings.finish_reason,
            http_status=self._http_status,
            proxied=self._view(outcome),
            parent_span_id=self.parent_span_id,
        )

    def _with_engine_times(self, record: RequestRecord) -> RequestRecord:
        findings = self._reader.findings
        # The times would be those of one choice.
        if findings.engine_times is None or self._several_choices:
            return record
        status = Status.OK if findings.error is None else Status.ERROR
        added, all_possible = with_engine_times(record, findings.engine_times, status)
        if not all_possible:
            self._context.on_failure(ProxyFailure.ENGINE_TIMES)
        return added

    def _view(self, outcome: RequestOutcome) -> ProxyView:
        findings, on_failure = self._reader.findings, self._context.on_failure
        timing, fields, headers = findings.timing, self._fields, self._client_headers
        names_in, priority = self._context.names_in, priority_header(headers)
        media = self._media.read()
        return ProxyView(
            first_byte_s=self._since_arrival(self._first_byte_at_s),
            first_visible_s=self._since_arrival(timing.visible_s),
            gaps=None if self._several_choices or not timing.gaps else timing.gaps,
            gap_tokens=timing.chunk_tokens,
            input_bytes=self._input_bytes,
            output_bytes=self._output_bytes,
            error=outcome.error,
            choices=fields.choices,
            streamed=self._streamed,
            ttft_limit_s=limit_s(self._client_headers, b"x-slo-ttft-ms", on_failure),
            tpot_limit_s=limit_s(self._client_headers, b"x-slo-tpot-ms", on_failure),
            response_id=findings.response_id,
            reasoning_s=None if self._several_choices else timing.reasoning_s,
            media_parts=media and media.parts,
            media_bytes=media and media.bytes_,
            priority=fields.priority if priority is None else priority,
            end_user=client_name(headers, names_in.user),
            workload=client_name(headers, names_in.workload),
            session=client_name(headers, names_in.session) or fields.session,
        )

    @property
    def _several_choices(self) -> bool:
        # Gaps are not kept by choice.
        return (self._fields.choices or len(self._reader.findings.finish_reasons)) > 1

    def _since_arrival(self, at_s: float | None) -> float | None:
        return None if at_s is None else at_s - self._at_s

    def _tpot_s(self, output_tokens: int | None, reasoning_tokens: int | None) -> float | None:
        if self._several_choices:
            return None
        return self._reader.findings.timing.tpot_s(output_tokens, reasoning_tokens)

    def _output_tokens(self, outcome: RequestOutcome) -> int | None:
        """Return the output tokens: 0 if the client left a stream before its first token."""
        findings = self._reader.findings
        counted = findings.usage.output_tokens
        left = outcome.status is Status.CANCELLED and self._streamed
        no_token = findings.timing.first_s is None and self._all_was_read
        return 0 if left and no_token and counted is None else counted

    @property
    def _all_was_read(self) -> bool:
        """Whether no byte of a stream passed unread, as those of a compressed one do."""
        if self._first_byte_at_s is None:
            return True
        return isinstance(self._reader, StreamReader) and self._reader.findings.missed is None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringOptions:
    """How requests are measured; the settings of the same names explain each.

    An engine that counts in each event for all clients (`--enable-force-include-usage`) needs
    neither `count_tokens` nor `continuous_usage`. With the latter its clients would lose counts
    that they rely on.
    """

    tenant_header: str | None = None
    user_header: str | None = None
    workload_header: str | None = None
    session_header: str | None = None
    count_tokens: bool = True
    continuous_usage: bool = False
    return_request_id: bool = True


def _header(name: str | None) -> bytes | None:
    return name.lower().encode() if name else None


class RequestMeasuring:
    """Measures the requests to the routes of `PROTOCOLS`; each becomes one record for the sink."""

    def __init__(
        self,
        agent: str,
        tracing: Tracing | None,
        sink: Callable[[RequestRecord], None] | None,
        on_failure: OnFailure,
        options: MeasuringOptions = MeasuringOptions(),
        *,
        opened: Callable[[RequestRecord], None] | None = None,
        lost: Callable[[str], None] | None = None,
    ) -> None:
        """Without `tracing`, each request comes with its span.

        `opened` gets a record of each request that was sent to an engine, for the case that this
        process dies, and `lost` the span id of a request whose record `sink` will not get.
        """
        self._tracing = tracing
        self._context = MeasuringContext(
            agent,
            ClientHeaders(
                tenant=_header(options.tenant_header),
                user=_header(options.user_header),
                workload=_header(options.workload_header),
                session=_header(options.session_header),
            ),
            options.return_request_id,
            sink,
            opened,
            lost,
            on_failure,
        )
        self._options = options

    def wants(self, method: str, path: str) -> bool:
        """Return whether a request is measured: a POST to one of the routes."""
        return method == "POST" and path in PROTOCOLS

    def begin(self, arrival: Arrival, span: RequestSpan | None = None) -> MeasuredExchange:
        """Start the measurement of a request, and its span unless this has begun."""
        protocol = PROTOCOLS[arrival.path]
        return MeasuredExchange(
            context=self._context,
            arrival=arrival,
            protocol=protocol,
            fields=self._fields(arrival, protocol),
            span=span or self._span(arrival),
        )

    def _span(self, arrival: Arrival) -> RequestSpan:
        assert self._tracing is not None, "without tracing each request has its span"
        return self._tracing.begin(arrival.headers)

    def _fields(self, arrival: Arrival, protocol: ApiProtocol) -> RequestFields:
        if arrival.body is None:
            if not arrival.client_left:
                self._context.on_failure(ProxyFailure.BODY_NOT_READ)
            return UNKNOWN
        fields = read_request_fields(
            arrival.body,
            protocol,
            count_tokens=self._options.count_tokens,
            continuous_usage=self._options.continuous_usage,
        )
        if fields is UNKNOWN:
            self._context.on_failure(ProxyFailure.BODY_UNREADABLE)
        return fields
