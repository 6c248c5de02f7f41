"""Which engine gets a request: of those that can serve it, the one with the fewest under way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count


@dataclass(frozen=True, slots=True)
class ProxiedEngine:
    """An engine behind the proxy, by its name in the settings."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the rest of the agent knows of an engine, asked for by its name at each request.

    `serves` tells its models, None where nobody knows them yet.
    """

    serves: Callable[[str], frozenset[str] | None]
    healthy: Callable[[str], bool]


class EngineChoice:
    """Chooses, and counts what is under way at each engine."""

    def __init__(self, engines: Sequence[ProxiedEngine], facts: EngineFacts) -> None:
        self._engines = tuple(engines)
        self._facts = facts
        self._turn = count()
        self.outstanding = {engine.name: 0 for engine in engines}

    def ranked(self, model: str | None) -> list[ProxiedEngine]:
        """The engines to try for a model, best first; those that are level take turns.

        Without a healthy one all are tried, for what is known of their health may be old.
        """
        if len(self._engines) == 1:
            return list(self._engines)
        healthy = [e for e in self._engines if self._facts.healthy(e.name)] or list(self._engines)
        serving = [e for e in healthy if model in (self._facts.serves(e.name) or ())]
        candidates = serving or healthy
        turn = next(self._turn) % len(candidates)
        in_turn = candidates[turn:] + candidates[:turn]
        return sorted(in_turn, key=lambda engine: self.outstanding[engine.name])

    def unranked(self) -> list[ProxiedEngine]:
        """All engines, where what is known of them cannot be had."""
        return list(self._engines)
