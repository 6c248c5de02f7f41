"""Readers of response bodies: what a reader finds, and the readers of bodies without a stream."""

from typing import Protocol

from agent.catalog.reasons import ProxyFailure
from agent.sources.proxy.measuring.api_protocols import ApiProtocol
from agent.sources.proxy.measuring.engine_times import EngineTimes
from agent.sources.proxy.measuring.parsed_event import (
    MAX_REASON_LENGTH,
    ParsedEvent,
    read_identity,
)
from agent.sources.proxy.measuring.token_timing import TokenTiming
from agent.sources.proxy.measuring.token_usage import TokenUsage

# Parsing blocks the relay; parsing a body of this size takes about 10 ms.
MAX_BODY_BYTES = 1 << 20


class ResponseFindings:
    """What a reader has found in a response so far.

    `missed` is why something could not be read. `response_id` and `model` are those that the
    response has.
    """

    __slots__ = (
        "done",
        "engine_times",
        "error",
        "finish_reasons",
        "missed",
        "model",
        "response_id",
        "timing",
        "usage",
    )

    def __init__(self) -> None:
        self.timing = TokenTiming()
        self.usage = TokenUsage()
        self.engine_times: EngineTimes | None = None
        self.finish_reasons: list[str] = []
        self.error: str | None = None
        self.done = False
        self.missed: ProxyFailure | None = None
        self.response_id: str | None = None
        self.model: str | None = None

    def identify(self, data: bytes) -> None:
        """Note the response's id and model, from a body or the first event that has an id."""
        if self.response_id is None:
            self.response_id, self.model = read_identity(data) or (None, None)

    def note(self, event: ParsedEvent) -> None:
        """Add everything but the times of an event."""
        if event.usage is not None:
            self.usage = self.usage.updated(event.usage)
        self.finish_reasons += event.finish_reasons
        self.engine_times = event.engine_times or self.engine_times
        self.error = self.error or event.error
        self.done = self.done or event.done

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; different reasons of several choices, sorted and joined by commas."""
        reasons = ",".join(sorted(set(self.finish_reasons)))
        return reasons if 0 < len(reasons) <= MAX_REASON_LENGTH else None


class ResponseReader(Protocol):
    """Reads the body of one response.

    After an exception in `take`, the client must still get `unsent` and then the piece.
    """

    findings: ResponseFindings
    unsent: bytes

    def take(self, data: bytes, at_s: float) -> bytes:
        """Read a piece of the body; return the bytes to send to the client now."""

    def finish(self, at_s: float) -> bytes:
        """Read the end of the body; return the last bytes for the client."""


class PassThroughReader:
    """Passes on a body without reading it: an error, or a compressed body."""

    __slots__ = ("findings", "unsent")

    def __init__(self, findings: ResponseFindings | None = None) -> None:
        self.findings = findings or ResponseFindings()
        self.unsent = b""

    def take(self, data: bytes, at_s: float) -> bytes:
        """Return the piece."""
        return data

    def finish(self, at_s: float) -> bytes:
        """Return nothing: all bytes were sent."""
        return b""


class WholeBodyReader:
    """Passes on a body of one JSON object, and reads it when it is complete."""

    __slots__ = ("_pieces", "_protocol", "_size_bytes", "findings", "unsent")

    def __init__(self, protocol: ApiProtocol) -> None:
        self.findings = ResponseFindings()
        self.unsent = b""
        self._protocol = protocol
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    def take(self, data: bytes, at_s: float) -> bytes:
        """Return the piece."""
        self._size_bytes += len(data)
        if self._size_bytes <= MAX_BODY_BYTES:
            self._pieces.append(data)
        else:
            self._pieces.clear()
            self.findings.missed = ProxyFailure.ANSWER_TOO_LARGE
        return data

    def finish(self, at_s: float) -> bytes:
        """Read the body; return nothing: all bytes were sent."""
        if self.findings.missed is None:
            body = b"".join(self._pieces)
            parsed = self._protocol.read_body(body)
            if parsed is None:
                self.findings.missed = ProxyFailure.ANSWER_UNREADABLE
            else:
                self.findings.identify(body)
                self.findings.note(parsed)
        return b""
