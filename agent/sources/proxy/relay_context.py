"""What every relay shares: ASGI types, clocks, limits, and the context that holds them."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from agent.sources.proxy.connection_pool import ConnectionPool
from agent.sources.proxy.exchange import OnFailure
from agent.sources.proxy.guard import GuardedMeasuring
from agent.sources.proxy.load_balancer import LoadBalancer

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Clocks:
    """Unix time, and a monotonic clock in seconds."""

    now: Callable[[], float]
    monotonic: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLimits:
    """Time-outs of an engine in seconds, and the largest request body that is buffered.

    The time-outs are the settings `proxy.connect_timeout`, `.answer_timeout` and `.gap_timeout`.
    """

    connect_s: float
    answer_s: float | None = None
    gap_s: float | None = None
    measured_body_bytes: int = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayContext:
    """Everything that a relay uses and does not own."""

    balancer: LoadBalancer
    pools: Mapping[str, ConnectionPool]
    measuring: GuardedMeasuring | None
    clocks: Clocks
    limits: ProxyLimits
    on_failure: OnFailure
