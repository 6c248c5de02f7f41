"""The measurement of one exchange."""

from collections.abc import Callable
from typing import NamedTuple

from agent.records.request import ProxyView, RequestRecord, Status, Vantage
from agent.sources.proxy.exchange import Arrival, Ending, RawHeaders, RequestSpan
from agent.sources.proxy.measuring.asked import Asked
from agent.sources.proxy.measuring.caller import limit_s, request_id_of, tenant_of
from agent.sources.proxy.measuring.outcome import Outcome, outcome_of
from agent.sources.proxy.measuring.protocols import Protocol
from agent.sources.proxy.measuring.reading import Reader, UnreadAnswer, WholeAnswer
from agent.sources.proxy.measuring.removal import UsageRemoval
from agent.sources.proxy.measuring.streaming import StreamedAnswer
from agent.sources.proxy.measuring.words import by_name

# Nothing is ever noted of an answer that is not read.
_UNREAD = UnreadAnswer()
_IDENTITY = (b"accept-encoding", b"identity")


class Surroundings(NamedTuple):
    """What all exchanges share."""

    agent: str
    tenant_header: bytes | None
    sink: Callable[[RequestRecord], None]
    on_failure: Callable[[str], None]


class MeasuredExchange:
    """Measures one exchange while its answer passes; the record is made when it has ended."""

    def __init__(
        self,
        *,
        around: Surroundings,
        arrival: Arrival,
        protocol: Protocol,
        asked: Asked,
        span: RequestSpan,
    ) -> None:
        self.body = asked.body
        self.model = asked.model
        self._caller = by_name(arrival.headers)
        self._request_id = request_id_of(self._caller, span.span_id)
        own = (b"x-request-id", self._request_id.encode())
        # What is compressed could not be given back without the counts that were asked for.
        self._takes_out = asked.final or asked.each
        encoding = [_IDENTITY] if self._takes_out else []
        self.headers: RawHeaders = [*span.headers, own, *encoding]
        self._around = around
        self._protocol = protocol
        self._route = arrival.path
        self._asked = asked
        self._span = span
        self._at = arrival.at
        self._at_s = arrival.at_s
        self._input_bytes = 0 if arrival.body is None else len(arrival.body)
        self._output_bytes = 0
        self._engine: str | None = None
        self._http_status: int | None = None
        self._first_byte_at_s: float | None = None
        self._streamed = asked.streamed
        self._reader: Reader = _UNREAD
        self._expected: StreamedAnswer | None = None

    def sent(self, size_bytes: int) -> None:
        """Bytes of a body that is relayed as it comes went to the engine."""
        self._input_bytes += size_bytes

    def routed(self, engine: str) -> None:
        """An engine was chosen, by its name in the settings."""
        self._engine = engine

    def answered(self, status: int, headers: RawHeaders, at_s: float) -> RawHeaders:
        """The head of the answer came; returns the headers that the client is to get."""
        self._http_status = status
        if status != 200:
            return headers
        told = by_name(headers)
        streamed = told.get(b"content-type", b"").lower().startswith(b"text/event-stream")
        self._streamed = streamed
        if (told.get(b"content-encoding") or b"identity").lower() != b"identity":
            self._around.on_failure("compressed_answer")
            return headers
        if not streamed:
            self._reader = WholeAnswer(self._protocol)
            return headers
        self._reader = self._expected or self._streamed_answer()
        if not self._takes_out:
            return headers
        return [line for line in headers if line[0] != b"content-length"]

    def chunk(self, data: bytes, at_s: float) -> bytes:
        """A piece of the answer's body came; returns what the client is to get now."""
        if self._first_byte_at_s is None and data:
            self._first_byte_at_s = at_s
        try:
            kept = self._reader.take(data, at_s)
        except Exception:
            # Whatever is wrong in here, the answer has to reach its client.
            kept = self._given_up() + data
        self._output_bytes += len(kept)
        return kept

    def catch_up(self) -> None:
        """Do what was put off until something had been sent on."""
        if self._http_status is None:
            # That of a stream is made while the engine works.
            self._expected = self._streamed_answer() if self._streamed else None
            return
        try:
            self._reader.catch_up()
        except Exception:
            self._given_up()

    def ended(self, ending: Ending, at_s: float) -> bytes:
        """The exchange is over; returns the last bytes for the client, mostly none."""
        try:
            kept = self._reader.finish(at_s)
        except Exception:
            kept = self._given_up()
        self._output_bytes += len(kept)
        try:
            record = self._record(ending, at_s)
            self._span.end(record)
            self._around.sink(record)
        except Exception:
            self._around.on_failure("record")
        return kept

    def _streamed_answer(self) -> StreamedAnswer:
        asked = self._asked
        removal = UsageRemoval(final=asked.final, each=asked.each) if self._takes_out else None
        return StreamedAnswer(self._protocol, removal, choices=asked.choices or 1)

    def _given_up(self) -> bytes:
        self._around.on_failure("measuring")
        unsent = self._reader.unsent
        self._reader = UnreadAnswer(self._reader.findings)
        return unsent

    def _record(self, ending: Ending, at_s: float) -> RequestRecord:
        findings = self._reader.findings
        if findings.missed is not None:
            self._around.on_failure(findings.missed)
        streamed = isinstance(self._reader, StreamedAnswer)
        outcome = outcome_of(ending, self._http_status, findings, streamed=streamed)
        timing, usage = findings.timing, findings.usage
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
            agent=self._around.agent,
            engine=self._engine,
            model=self.model,
            tenant=tenant_of(self._caller, self._around.tenant_header),
            route=self._route,
            ttft_s=self._since_arrival(timing.first_s),
            tpot_s=None if self._several else timing.tpot_s(output_tokens),
            e2e_s=at_s - self._at_s,
            max_gap_s=None if self._several else timing.max_gap_s,
            input_tokens=usage.input_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=output_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            finish_reason=findings.finish_reason,
            http_status=self._http_status,
            proxied=self._view(outcome),
        )

    def _view(self, outcome: Outcome) -> ProxyView:
        timing, on_failure = self._reader.findings.timing, self._around.on_failure
        return ProxyView(
            first_byte_s=self._since_arrival(self._first_byte_at_s),
            first_visible_s=self._since_arrival(timing.visible_s),
            gaps=None if self._several or not timing.gaps else timing.gaps,
            gap_tokens=timing.chunk_tokens,
            input_bytes=self._input_bytes,
            output_bytes=self._output_bytes,
            error=outcome.error,
            choices=self._asked.choices,
            streamed=self._streamed,
            ttft_limit_s=limit_s(self._caller, b"x-slo-ttft-ms", on_failure),
            tpot_limit_s=limit_s(self._caller, b"x-slo-tpot-ms", on_failure),
        )

    @property
    def _several(self) -> bool:
        # Which choice a gap belongs to is not told apart.
        return (self._asked.choices or len(self._reader.findings.finishes)) > 1

    def _since_arrival(self, at_s: float | None) -> float | None:
        return None if at_s is None else at_s - self._at_s

    def _output_tokens(self, outcome: Outcome) -> int | None:
        """A stream that its client left before the first token has none, which no engine counts."""
        findings = self._reader.findings
        left = outcome.status is Status.CANCELLED and self._streamed
        if left and findings.timing.first_s is None and findings.output_tokens is None:
            return 0
        return findings.output_tokens
