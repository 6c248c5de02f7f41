"""What an engine's page said at one moment, in our words."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Cumulative counts of one engine histogram: `bounds` end in +inf, `counts` run beside them."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """One reading of one engine, merged over its data-parallel ranks.

    `facts` maps (fact name, label values in the fact's own order) to a number;
    `histograms` maps a fact name to its snapshot. What the page does not tell is absent.
    `ranks` are what shows of each rank alone whether it computes, where there are several; they
    are not stored.
    """

    engine: str
    at: float
    dialect: str
    model: str | None
    facts: Mapping[tuple[str, tuple[str, ...]], float]
    histograms: Mapping[str, HistogramSnapshot] = field(default_factory=dict)
    process_started_at: float | None = None
    ranks: Mapping[str, "EngineSample"] = field(default_factory=dict)

    def fact(self, name: str, *labels: str) -> float | None:
        """The value of one fact, or None where the page did not tell it."""
        return self.facts.get((name, labels))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """Who sent a span: the configured engine and its model, each None where unknown."""

    engine: str | None
    model: str | None
