"""The interface between relaying and measuring; one exchange is one request and its response."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from agent.catalog.reasons import ProxyFailure
from agent.records.request import RequestRecord

# Names in lower case, in the order received; a name may repeat.
RawHeaders = Sequence[tuple[bytes, bytes]]
# Pieces of a body, each with the time of its read.
Reads = Sequence[tuple[bytes, float]]
# Counts a failure inside the agent.
OnFailure = Callable[[ProxyFailure], None]


def joined(reads: Reads) -> bytes:
    """Return the bytes of the pieces."""
    return reads[0][0] if len(reads) == 1 else b"".join([data for data, _ in reads])


class Ending(StrEnum):
    """How an exchange ended, as the relay saw it."""

    COMPLETE = "complete"  # the engine's response was relayed to its end
    CLIENT_GONE = "client_gone"
    ENGINE_GONE = "engine_gone"  # the engine's response stopped before its end
    UNREACHABLE = "unreachable"  # the engine sent no response
    TIMEOUT = "timeout"  # the engine exceeded a timeout of the proxy
    REFUSED = "refused"  # the proxy itself responded: it is stopping, or refused the request


class Arrival(NamedTuple):
    """A request as it came from the client.

    `at` is Unix time. `at_s` is the same moment on the monotonic clock of all later `at_s`. `body`
    is None if it is too large to be buffered, and is then relayed as it arrives, or if
    `client_left` before its end.
    """

    method: str
    path: str
    headers: RawHeaders
    body: bytes | None
    at: float
    at_s: float
    client_left: bool = False


class Exchange(Protocol):
    """The measurement of one exchange. No method raises, whatever the bytes are.

    The relay calls `routed` for each engine that it tries, then `answered` at most once, then
    `chunk` for every piece of the body, and at last `ended`, exactly once. It calls `catch_up`
    after the request went to the engine: other work must not delay the first token. Any other call
    may come before `catch_up`.
    """

    # Replaces the client's body on the way to the engine; None leaves the body. Whoever takes it
    # sets it to None, since it may be large.
    body: bytes | None
    # Header lines for the engine; each replaces the client's lines of that name, without a value by
    # none.
    headers: RawHeaders
    # Header lines for the client, if the response has none of that name.
    added_headers: RawHeaders
    # The model that the request names, used to choose an engine; None if unknown.
    model: str | None
    # Whether a whole response says that the engine failed, as by an error inside a stream. Known
    # after `ended`.
    engine_failed: bool

    def sent(self, size_bytes: int) -> None:
        """Count bytes of an unbuffered request body that went to the engine."""

    def routed(self, engine: str) -> None:
        """Note the engine that is tried now, by its name in the settings; it may be gone."""

    def answered(self, status: int, headers: RawHeaders, at_s: float) -> RawHeaders:
        """Read the head of the response; return the headers for the client."""

    def chunk(self, data: bytes, at_s: float) -> bytes:
        """Read a piece of the response's body; return the bytes to send to the client now."""

    def catch_up(self) -> None:
        """Do the work that was deferred until the request was sent."""

    def ended(self, ending: Ending, at_s: float) -> bytes:
        """End the measurement; return the last bytes for the client, mostly none."""


class Measuring(Protocol):
    """Starts the measurement of exchanges."""

    def wants(self, method: str, path: str) -> bool:
        """Return whether a request is measured; all others pass unmeasured."""

    def begin(self, arrival: Arrival) -> Exchange:
        """Start the measurement of a request for which `wants` returned True."""


class RequestSpan(Protocol):
    """The trace span of one exchange; ids in lower-case hex."""

    trace_id: str
    span_id: str
    # The trace context for the engine; the engine's span becomes a child of this span.
    headers: RawHeaders

    def end(self, record: RequestRecord, response_model: str | None) -> None:
        """End the span with the fields of the record, and the model in the response."""


class Tracing(Protocol):
    """Starts the span of each measured exchange."""

    def begin(self, headers: RawHeaders) -> RequestSpan:
        """Return the span of a request with these headers from its client."""
