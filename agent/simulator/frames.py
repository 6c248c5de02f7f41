"""What a simulated engine gives of its past: frames, each of one moment."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

# Time between two frames.
FRAME_S = 42.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxiedRequest:
    """One request as a proxy in front of the engine saw it; times in seconds from its arrival.

    `waits` are those for its tokens after the first: a time, and how many equal ones in a row.
    Without a first token it failed, unless its client `left`.
    """

    trace_id: str
    span_id: str
    request_id: str
    tenant: str | None
    started_at: float
    first_s: float | None
    ended_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str | None
    left: bool = False
    waits: tuple[tuple[float, int], ...] = ()


_PROXIED = tuple(each.name for each in fields(ProxiedRequest))


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One moment of the past, and the requests that ended since the frame before.

    `exposition` is None while the engine is dead. `spans` is an OTLP export in base64.
    """

    at: float
    exposition: str | None
    gpu: Mapping[str, Any]
    spans: str | None
    proxied: tuple[ProxiedRequest, ...]

    def plain(self) -> dict[str, Any]:
        """The same as JSON takes it."""
        proxied = [{name: getattr(each, name) for name in _PROXIED} for each in self.proxied]
        whole = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**whole, "proxied": proxied}


def frame_of(plain: Mapping[str, Any]) -> Frame:
    """The frame that `plain` was made of."""
    proxied = tuple(ProxiedRequest(**each) for each in plain["proxied"])
    return Frame(**{**plain, "proxied": proxied})
