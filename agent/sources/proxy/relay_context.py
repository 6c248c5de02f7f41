"""What every relay shares: ASGI types, clocks, limits, memory for bodies, and their context."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from agent.sources.proxy.engine_connection import ConnectionPool
from agent.sources.proxy.exchange import GuardedMeasuring, OnFailure
from agent.sources.proxy.load_balancer import LoadBalancer


class BodyRoom:
    """Room for the bodies of all requests together.

    One body may take as much as is still free after it, so that a few large ones never take the
    room from the small ones: N bodies of any size leave a part in N + 1 of the room free.
    """

    __slots__ = ("_free_bytes",)

    def __init__(self, total_bytes: int) -> None:
        self._free_bytes = total_bytes

    def has(self, size_bytes: int) -> bool:
        """Whether a body of this size may take room now."""
        return 2 * size_bytes <= self._free_bytes

    def take(self, held_bytes: int, more_bytes: int) -> bool:
        """Take more room for a body that holds some; False if it may not have it."""
        if held_bytes + more_bytes > self._free_bytes - more_bytes:
            return False
        self._free_bytes -= more_bytes
        return True

    def give_back(self, held_bytes: int) -> None:
        """Free the room of a body."""
        self._free_bytes += held_bytes


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


KEPT_ROOM_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Clocks:
    """Unix time, and a monotonic clock in seconds."""

    now: Callable[[], float]
    monotonic: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLimits:
    """Time-outs in seconds, and the sizes of request bodies that are buffered.

    The time-outs of an engine are the settings `proxy.connect_timeout`, `.answer_timeout` and
    `.gap_timeout`. A body is buffered for `body_s`. All bodies together have `body_room_bytes`, and
    those that are kept until an engine answers `kept_room_bytes`.
    """

    connect_s: float
    answer_s: float | None = None
    gap_s: float | None = None
    body_s: float = 60.0
    measured_body_bytes: int = 32 * 1024 * 1024
    body_room_bytes: int = 64 * 1024 * 1024
    kept_room_bytes: int = KEPT_ROOM_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayContext:
    """Everything that a relay uses and does not own."""

    balancer: LoadBalancer
    pools: Mapping[str, ConnectionPool]
    measuring: GuardedMeasuring | None
    clocks: Clocks
    limits: ProxyLimits
    room: BodyRoom
    kept: BodyRoom
    on_failure: OnFailure
