"""A measuring that records the calls of the relay."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agent.sources.proxy.exchange import Arrival, Ending, Exchange, RawHeaders


@dataclass(slots=True)
class Recorded:
    """One exchange; its return values can be set, and the call that raises."""

    arrival: Arrival
    body: bytes | None = None
    headers: RawHeaders = ()
    added_headers: RawHeaders = ()
    model: str | None = None
    engine_failed: bool = False
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    fails_at: str | None = None
    change: Callable[[bytes], bytes] = bytes
    last: bytes = b""
    response_headers: RawHeaders | None = None

    @property
    def names(self) -> list[str]:
        """The names of the calls, in order."""
        return [call[0] for call in self.calls]

    @property
    def ending(self) -> Ending | None:
        """How it ended, None before its end."""
        return next((call[1] for call in self.calls if call[0] == "ended"), None)

    def sent(self, size_bytes: int) -> None:
        self._record("sent", size_bytes)

    def routed(self, engine: str) -> None:
        self._record("routed", engine)

    def answered(self, status: int, headers: RawHeaders, at_s: float) -> RawHeaders:
        self.times_s.append(at_s)
        self._record("answered", status, tuple(headers))
        return headers if self.response_headers is None else self.response_headers

    def chunk(self, data: bytes, at_s: float) -> bytes:
        self.times_s.append(at_s)
        self._record("chunk", data)
        return self.change(data)

    def catch_up(self) -> None:
        if self.fails_at == "catch_up":
            self._record("catch_up")

    def ended(self, ending: Ending, at_s: float) -> bytes:
        self.times_s.append(at_s)
        self.over.set()
        self._record("ended", ending)
        return self.last

    def _record(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        if self.fails_at == name:
            raise RuntimeError(f"{name} is broken")


class Recorder:
    """Measures every POST; `made` are the exchanges, `prepare` may change each one."""

    def __init__(self, prepare: Callable[[Recorded], None] = lambda _: None) -> None:
        self.made: list[Recorded] = []
        self._prepare = prepare

    def wants(self, method: str, path: str) -> bool:
        return method == "POST"

    def begin(self, arrival: Arrival) -> Exchange:
        exchange = Recorded(arrival)
        self.made.append(exchange)
        self._prepare(exchange)
        return exchange
