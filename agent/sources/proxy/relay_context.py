"""What every relay shares: ASGI types, clocks, limits, and the context that holds them."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from agent.sources.proxy.body_room import BodyRoom
from agent.sources.proxy.connection_pool import ConnectionPool
from agent.sources.proxy.exchange import OnFailure
from agent.sources.proxy.guard import GuardedMeasuring
from agent.sources.proxy.load_balancer import LoadBalancer

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
