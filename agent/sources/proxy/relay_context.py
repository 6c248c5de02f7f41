"""What every relay shares: clocks, limits, memory for bodies, deferred records."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
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


# libuv runs a timer of less than 1 ms at once, where the next request of the client would meet it.
_DEFERRED_S = 0.005
_SLICE_S = 0.0002
_MAX_DEFERRED = 64


class DeferredWork:
    """Work that no client waits for: it is done a little later, in slices.

    If more waits than the limit allows, the oldest is done at once. The work raises nothing.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._planned = False

    def add(self, work: Callable[[], None]) -> None:
        """Do this later."""
        self._waiting.append(work)
        if len(self._waiting) > _MAX_DEFERRED:
            self._waiting.popleft()()
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_later(_DEFERRED_S, self._do_slice)

    def finish(self) -> None:
        """Do all of it now."""
        while self._waiting:
            self._waiting.popleft()()

    def _do_slice(self) -> None:
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + _SLICE_S
        while self._waiting and loop.time() < ends_s:
            self._waiting.popleft()()
        self._planned = bool(self._waiting)
        if self._planned:
            loop.call_soon(self._do_slice)


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
    deferred: DeferredWork
    # Gets each relay that has ended.
    ended: Callable[[Any], None]
    on_failure: OnFailure
