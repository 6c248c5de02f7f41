"""One sample of an engine: facts and histograms of its exposition, under our names."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.records.gpu import Facts


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Cumulative counts of one engine histogram, one per bound; the last bound is +inf."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """One sample of one engine, merged over its data-parallel ranks.

    `facts` maps (fact name, label values in the fact's own order) to a number;
    `histograms` maps a fact name to its snapshot. Unknown facts are absent. With several ranks,
    `ranks` has the facts of each one that show whether it computes; they are not stored.
    """

    engine: str
    at: float
    dialect: str
    model: str | None
    facts: Facts
    histograms: Mapping[str, HistogramSnapshot] = field(default_factory=dict)
    process_started_at: float | None = None
    ranks: Mapping[str, "EngineSample"] = field(default_factory=dict)

    def fact(self, name: str, *labels: str) -> float | None:
        """Return the value of one fact, None if unknown."""
        return self.facts.get((name, labels))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """The sender of a span: the configured engine and its model, None if unknown."""

    engine: str | None
    model: str | None
