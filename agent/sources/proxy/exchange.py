"""What relaying and measuring know of each other: one exchange is one request and its answer."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from agent.records.request import RequestRecord

# Names in lower case, in the order and number in which they came.
RawHeaders = Sequence[tuple[bytes, bytes]]
# Pieces of a body, each with the time of its read.
Reads = Sequence[tuple[bytes, float]]


class Ending(StrEnum):
    """How an exchange ended, as the relay saw it."""

    COMPLETE = "complete"  # the engine's answer was relayed to its end
    CLIENT_GONE = "client_gone"
    ENGINE_GONE = "engine_gone"  # the engine's answer stopped before its end
    UNREACHABLE = "unreachable"  # the engine gave no answer at all
    TIMEOUT = "timeout"  # the engine let a limit of the proxy pass
    REFUSED = "refused"  # the proxy itself answered: no engine for it, or stopping


class Arrival(NamedTuple):
    """A request as it came from the client.

    `at` is Unix time, `at_s` the same moment on the monotonic clock of all later `at_s`. `body` is
    None where it is too large to be held: it is then relayed as it comes.
    """

    method: str
    path: str
    headers: RawHeaders
    body: bytes | None
    at: float
    at_s: float


class Exchange(Protocol):
    """The measurement of one exchange. Nothing here raises, whatever the bytes are.

    The relay calls `routed` at most once, then `answered` at most once, then `chunk` for every
    piece of the body, and at last `ended`, exactly once. It calls `catch_up` when the request has
    gone to the engine, and when one of the first pieces has gone to the client, so that what can
    wait does not hold up the first token. Any other call may come before.
    """

    # What the engine is to get in place of the client's body and headers; None leaves the body.
    body: bytes | None
    # Header lines for the engine, each in place of any of the same name.
    headers: RawHeaders
    # The model that the request names, by which an engine is chosen; None where it names none.
    model: str | None

    def sent(self, size_bytes: int) -> None:
        """Bytes of a body that is relayed as it comes went to the engine."""

    def routed(self, engine: str) -> None:
        """An engine was chosen, by its name in the settings."""

    def answered(self, status: int, headers: RawHeaders, at_s: float) -> RawHeaders:
        """The head of the answer came; returns the headers that the client is to get."""

    def chunk(self, data: bytes, at_s: float) -> bytes:
        """A piece of the answer's body came; returns what the client is to get now."""

    def catch_up(self) -> None:
        """Do what was put off until something had been sent on."""

    def ended(self, ending: Ending, at_s: float) -> bytes:
        """The exchange is over; returns the last bytes for the client, mostly none."""


class Measuring(Protocol):
    """Begins the measurement of exchanges."""

    def wants(self, method: str, path: str) -> bool:
        """Whether a request is measured; all others pass through unseen."""

    def begin(self, arrival: Arrival) -> Exchange:
        """The measurement of a request that is wanted."""


class RequestSpan(Protocol):
    """The trace span of one exchange; ids in lower-case hex."""

    trace_id: str
    span_id: str
    # The trace context for the engine, whose span becomes this one's child.
    headers: RawHeaders

    def end(self, record: RequestRecord) -> None:
        """The exchange is over; the span says what the record says."""


class Tracing(Protocol):
    """Begins the span of each measured exchange."""

    def begin(self, headers: RawHeaders) -> RequestSpan:
        """The span of a request with these headers from its client."""
