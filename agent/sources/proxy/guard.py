"""Measuring, held so that no fault in it reaches the traffic."""

from collections.abc import Callable
from typing import TypeVar

from agent.sources.proxy.exchange import Arrival, Ending, Exchange, Measuring, RawHeaders, Reads

# Told of a call into the agent's own code that raised, by a short word.
OnFailure = Callable[[str], None]

Result = TypeVar("Result")


class GuardedExchange:
    """An exchange that, once a call to it has raised, lets everything through as it comes.

    `ended` is called even then, so that what counts exchanges under way stays right.
    """

    def __init__(self, exchange: Exchange, on_failure: OnFailure) -> None:
        self._exchange = exchange
        self._on_failure = on_failure
        self._broken = False
        self.body: bytes | None = None
        self.headers: RawHeaders = ()
        self.model: str | None = None
        try:
            self.headers = tuple(exchange.headers)
            self.body, self.model = exchange.body, exchange.model
        except Exception:
            self._fail("begin")

    def sent(self, size_bytes: int) -> None:
        """Bytes of a body that is relayed as it comes went to the engine."""
        self._guarded("sent", lambda: self._exchange.sent(size_bytes), None)

    def routed(self, engine: str) -> None:
        """An engine was chosen."""
        self._guarded("routed", lambda: self._exchange.routed(engine), None)

    def answered(self, status: int, headers: RawHeaders, at_s: float) -> RawHeaders:
        """The headers that the client is to get."""
        return self._guarded(
            "answered", lambda: tuple(self._exchange.answered(status, headers, at_s)), headers
        )

    def chunks(self, reads: Reads) -> bytes:
        """What the client is to get of these pieces."""
        # On the way of every piece, hence without the indirection.
        if len(reads) == 1 and not self._broken:
            data, at_s = reads[0]
            try:
                return self._exchange.chunk(data, at_s)
            except Exception:
                self._fail("chunk")
                return data
        return b"".join([self._chunk(data, at_s) for data, at_s in reads])

    def _chunk(self, data: bytes, at_s: float) -> bytes:
        return self._guarded("chunk", lambda: self._exchange.chunk(data, at_s), data)

    def catch_up(self) -> None:
        """Do what was put off."""
        if self._broken:
            return
        try:
            self._exchange.catch_up()
        except Exception:
            self._fail("catch_up")

    def ended(self, ending: Ending, at_s: float) -> bytes:
        """The last bytes for the client."""
        try:
            last = self._exchange.ended(ending, at_s)
        except Exception:
            self._fail("ended")
            return b""
        return b"" if self._broken else last

    def _guarded(self, name: str, call: Callable[[], Result], instead: Result) -> Result:
        if self._broken:
            return instead
        try:
            return call()
        except Exception:
            self._fail(name)
            return instead

    def _fail(self, name: str) -> None:
        self._broken = True
        self._on_failure(name)


class GuardedMeasuring:
    """Begins exchanges; a request whose measurement cannot begin goes unmeasured."""

    def __init__(self, measuring: Measuring, on_failure: OnFailure) -> None:
        self._measuring = measuring
        self._on_failure = on_failure

    def wants(self, method: str, path: str) -> bool:
        """Whether a request is measured."""
        try:
            return self._measuring.wants(method, path)
        except Exception:
            self._on_failure("wants")
            return False

    def begin(self, arrival: Arrival) -> GuardedExchange | None:
        """The measurement of a request, None where it cannot begin."""
        try:
            exchange = self._measuring.begin(arrival)
        except Exception:
            self._on_failure("begin")
            return None
        return GuardedExchange(exchange, self._on_failure)
