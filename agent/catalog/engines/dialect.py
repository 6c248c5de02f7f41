"""How one kind of engine spells our facts: data for the engine source, no code per engine."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

from agent.catalog.engine_facts import PROCESS_START_TIME
from agent.catalog.metric import Merge, Metric


@dataclass(frozen=True, slots=True)
class Spelling:
    """One series that tells a fact; of a histogram, its name before `_bucket`.

    `labels` maps our label to the engine's where they differ. `only` names the label values that
    count. `number_in` names the label that holds the number, for series whose value is always 1;
    `words` are the numbers that words in that label stand for.
    `merge` replaces the fact's own rule where this series needs another.
    """

    series: str
    _: KW_ONLY
    labels: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    number_in: str | None = None
    words: Mapping[str, float] = field(default_factory=dict)
    zero_means_off: bool = False
    merge: Merge | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One kind of engine: where its page is, how it spells each fact (newest first), its ranks.

    A page is in this dialect when it has series that start with one of `prefixes`; `facts` are
    written with the first of these. Ranks in `merged_ranks` each do work of their own; of the
    ranks in `mirrored_ranks` each repeats what the lowest says. A series that has a label of
    `totals` counts only with the value given there. One that has the label `foreign` and not the
    label `own` was published by something else under the engine's name, and never counts.
    """

    engine: str
    prefixes: tuple[str, ...]
    facts: Mapping[Metric, tuple[Spelling, ...]]
    metrics_path: str = "/metrics"
    model_path: str = "/v1/models"
    model_label: str | None = None
    merged_ranks: tuple[str, ...] = ()
    mirrored_ranks: tuple[str, ...] = ()
    totals: Mapping[str, str] = field(default_factory=dict)
    foreign: str | None = None
    own: str | None = None


# Prometheus client libraries publish this for any process, under one name and no prefix.
PROCESS_FACTS: Mapping[Metric, tuple[Spelling, ...]] = {
    PROCESS_START_TIME: (Spelling("process_start_time_seconds"),),
}
