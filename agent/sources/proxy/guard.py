"""Wrappers around measuring: a failure in measuring never affects the traffic."""

from collections.abc import Callable
from typing import TypeVar

from agent.catalog.reasons import ProxyFailure
from agent.sources.proxy.exchange import (
    Arrival,
    Ending,
    Exchange,
    Measuring,
    OnFailure,
    RawHeaders,
    Reads,
)

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
    def engine_failed(self) -> bool:
        """Whether a whole response says that the engine failed."""
        return not self._broken and self._exchange.engine_failed

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

    def chunks(self, reads: Reads) -> bytes:
        """Return the bytes of these pieces that go to the client now."""
        # Runs for every piece of a stream, so it avoids the calls through `_guarded`.
        if len(reads) == 1 and not self._broken:
            data, at_s = reads[0]
            try:
                return self._exchange.chunk(data, at_s)
            except Exception:
                self._fail(ProxyFailure.CHUNK)
                return data
        return b"".join([self._chunk(data, at_s) for data, at_s in reads])

    def _chunk(self, data: bytes, at_s: float) -> bytes:
        return self._guarded(ProxyFailure.CHUNK, lambda: self._exchange.chunk(data, at_s), data)

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
