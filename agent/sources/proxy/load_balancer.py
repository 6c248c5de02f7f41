"""Chooses the engine for a request: the one with the fewest open requests that serves the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from agent.sources.proxy.open_requests import OpenRequests


@dataclass(frozen=True, slots=True)
class ProxiedEngine:
    """An engine behind the proxy, by its name in the settings."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class EngineLookup:
    """What the rest of the agent knows about an engine, by name, looked up on each request.

    `models` returns None while the engine's models are unknown.
    """

    models: Callable[[str], frozenset[str] | None]
    healthy: Callable[[str], bool]


class LoadBalancer:
    """Orders the engines for each request and counts the open requests of each engine."""

    def __init__(
        self,
        engines: Sequence[ProxiedEngine],
        lookup: EngineLookup,
        open_requests: OpenRequests | None = None,
    ) -> None:
        """`open_requests` are those of several workers together."""
        self.engines = tuple(engines)
        self._lookup = lookup
        self._turn = count()
        self.open_requests = open_requests or OpenRequests([engine.name for engine in engines])

    def candidates(self, model: str | None) -> Sequence[ProxiedEngine]:
        """Return the engines to try for a model, best first; equal engines take turns.

        If no engine that serves the model is healthy, all of these are tried: the known health may
        be out of date, and an engine without the model would blame the client's request (404). The
        same holds for a model that no engine is known to serve, and all engines.
        """
        if len(self.engines) == 1:
            return self.engines
        serving = [e for e in self.engines if model in (self._lookup.models(e.name) or ())]
        possible = serving or list(self.engines)
        candidates = [e for e in possible if self._lookup.healthy(e.name)] or possible
        turn = next(self._turn) % len(candidates)
        in_turn = candidates[turn:] + candidates[:turn]
        return sorted(in_turn, key=lambda engine: self.open_requests[engine.name])
