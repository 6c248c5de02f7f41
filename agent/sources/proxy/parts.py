"""What the relaying of every request needs."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from agent.sources.proxy.choosing import EngineChoice
from agent.sources.proxy.guard import GuardedMeasuring, OnFailure
from agent.sources.proxy.pool import EnginePool

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Clocks:
    """Unix time, and seconds that never go back."""

    now: Callable[[], float]
    monotonic: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long an engine may take, None for as long as it likes, and what is held of a request.

    `answer_s` is from the request to the head of the answer, `gap_s` between two of its pieces.
    """

    connect_s: float = 5.0
    answer_s: float | None = None
    gap_s: float | None = None
    measured_body_bytes: int = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyParts:
    """Everything that a relay uses and does not own."""

    choice: EngineChoice
    pools: Mapping[str, EnginePool]
    measuring: GuardedMeasuring | None
    clocks: Clocks
    limits: Limits
    on_failure: OnFailure
