"""The interface between relaying and measuring; one exchange is one request and its response.

A failure in measuring never affects the traffic.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeVar

from agent.catalog.reasons import ProxyFailure
from agent.records.request import RequestRecord

# Names in lower case, in the order received; a name may repeat.
RawHeaders = Sequence[tuple[bytes, bytes]]
# Pieces of a body, each with the time of its read.
Reads = Sequence[tuple[bytes, float]]
# Counts a failure inside the agent.
OnFailure = Callable[[ProxyFailure], None]


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
    # The HTTP status that an error inside a whole response 200 stands for, None without one. Known
    # after `ended`.
    error_status: int | None

    def sent(self, size_bytes: int) -> None:
        """Count bytes of an unbuffered request body that went to the engine."""

    def routed(self, engine: str) -> None:
        """Note the engine that is tried now, by its name in the settings; it may be gone."""

    def answered(self, status: int, headers: RawHeaders, at_s: float) -> RawHeaders:
        """Read the head of the response; return the headers for the client."""

    def chunk(self, data: bytes, at_s: float) -> bytes:
        """Read a piece of the response's body; return the bytes to send to the client now."""

    def passes(self, data: bytes) -> bool:
        """Whether the client gets these bytes unchanged, and no others if they are the last.

        Then they may be sent before `chunk` reads them, and the last ones before `ended`.
        """

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


Result = TypeVar("Result")


class GuardedExchange:
    """An exchange that passes all bytes unchanged after one of its calls raised.

    `ended` is called even then, so that counts of open exchanges stay right.
    """

    def __init__(self, exchange: Exchange, on_failure: OnFailure) -> None:
        self._exchange = exchange
        self._on_failure = on_failure
        self._broken = False
        self.body: bytes | None = None
        self.headers: RawHeaders = ()
        self.added_headers: RawHeaders = ()
        self.model: str | None = None
        try:
            self.headers = tuple(exchange.headers)
            self.added_headers = tuple(exchange.added_headers)
            self.body, self.model = exchange.body, exchange.model
            exchange.body = None
        except Exception:
            self._fail(ProxyFailure.BEGIN)

    @property
    def error_status(self) -> int | None:
        """The HTTP status that an error inside a whole response stands for; None without one."""
        return None if self._broken else self._exchange.error_status

    def take_body(self) -> bytes | None:
        """Return the body for the engine, once."""
        body, self.body = self.body, None
        return body

    def sent(self, size_bytes: int) -> None:
        """Count bytes of an unbuffered request body that went to the engine."""
        self._guarded(ProxyFailure.SENT, lambda: self._exchange.sent(size_bytes), None)

    def routed(self, engine: str) -> None:
        """Note the engine that is tried now."""
        self._guarded(ProxyFailure.ROUTED, lambda: self._exchange.routed(engine), None)

    def answered(self, status: int, headers: RawHeaders, at_s: float) -> RawHeaders:
        """Return the headers for the client."""
        return self._guarded(
            ProxyFailure.ANSWERED,
            lambda: tuple(self._exchange.answered(status, headers, at_s)),
            headers,
        )

    # The next two run for every piece of a stream, so they avoid the calls through `_guarded`.

    def chunk(self, data: bytes, at_s: float) -> bytes:
        """Return the bytes that go to the client now."""
        if self._broken:
            return data
        try:
            return self._exchange.chunk(data, at_s)
        except Exception:
            self._fail(ProxyFailure.CHUNK)
            return data

    def passes(self, data: bytes) -> bool:
        """Whether the client gets these bytes unchanged."""
        if self._broken:
            return True
        try:
            return self._exchange.passes(data)
        except Exception:
            self._fail(ProxyFailure.CHUNK)
            return True

    def catch_up(self) -> None:
        """Do the deferred work."""
        if self._broken:
            return
        try:
            self._exchange.catch_up()
        except Exception:
            self._fail(ProxyFailure.CATCH_UP)

    def ended(self, ending: Ending, at_s: float) -> bytes:
        """Return the last bytes for the client."""
        try:
            last = self._exchange.ended(ending, at_s)
        except Exception:
            self._fail(ProxyFailure.ENDED)
            return b""
        return b"" if self._broken else last

    def _guarded(
        self, reason: ProxyFailure, call: Callable[[], Result], fallback: Result
    ) -> Result:
        if self._broken:
            return fallback
        try:
            return call()
        except Exception:
            self._fail(reason)
            return fallback

    def _fail(self, reason: ProxyFailure) -> None:
        self._broken = True
        self._on_failure(reason)


class GuardedMeasuring:
    """Starts exchanges; a request whose measurement cannot start passes unmeasured."""

    def __init__(self, measuring: Measuring, on_failure: OnFailure) -> None:
        self._measuring = measuring
        self._on_failure = on_failure

    def wants(self, method: str, path: str) -> bool:
        """Return whether a request is measured."""
        try:
            return self._measuring.wants(method, path)
        except Exception:
            self._on_failure(ProxyFailure.WANTS)
            return False

    def begin(self, arrival: Arrival) -> GuardedExchange | None:
        """Return the measurement of a request; None if it cannot start."""
        try:
            exchange = self._measuring.begin(arrival)
        except Exception:
            self._on_failure(ProxyFailure.BEGIN)
            return None
        return GuardedExchange(exchange, self._on_failure)
