"""What every relay shares: ASGI types, clocks, limits, memory for bodies, and their context."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from agent.sources.proxy.engine_connection import ConnectionPool
from agent.sources.proxy.exchange import GuardedMeasuring, OnFailure
from agent.sources.proxy.load_balancer import LoadBalancer


class BodyMemory:
    """The memory of the bodies of all requests together.

    One body may take as much as is still free after it, so that a few large ones never take the
    memory from the small ones: N bodies of any size leave a part in N + 1 of the memory free.
    """

    __slots__ = ("_free_bytes",)

    def __init__(self, total_bytes: int) -> None:
        self._free_bytes = total_bytes

    def has(self, size_bytes: int) -> bool:
        """Whether a body of this size may take memory now."""
        return 2 * size_bytes <= self._free_bytes

    def take(self, held_bytes: int, more_bytes: int) -> bool:
        """Take more memory for a body that holds some; False if it may not have it."""
        if held_bytes + more_bytes > self._free_bytes - more_bytes:
            return False
        self._free_bytes -= more_bytes
        return True

    def give_back(self, held_bytes: int) -> None:
        """Free the memory of a body."""
        self._free_bytes += held_bytes


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


KEPT_MEMORY_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Clocks:
    """Unix time, and a monotonic clock in seconds."""

    now: Callable[[], float]
    monotonic: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLimits:
    """Time-outs in seconds, and the sizes of request bodies that are buffered.

    The time-outs of an engine are the settings `proxy.connect_timeout`, `.answer_timeout` and
    `.gap_timeout`. A body is buffered for `body_s`. All bodies together have `body_memory_bytes`,
    those that are kept until an engine answers `kept_memory_bytes`.
    """

    connect_s: float
    answer_s: float | None = None
    gap_s: float | None = None
    body_s: float = 60.0
    measured_body_bytes: int = 32 * 1024 * 1024
    body_memory_bytes: int = 64 * 1024 * 1024
    kept_memory_bytes: int = KEPT_MEMORY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayContext:
    """Everything that a relay uses and does not own."""

    balancer: LoadBalancer
    pools: Mapping[str, ConnectionPool]
    measuring: GuardedMeasuring | None
    clocks: Clocks
    limits: ProxyLimits
    body_memory: BodyMemory
    kept_memory: BodyMemory
    on_failure: OnFailure
