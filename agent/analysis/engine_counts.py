"""Increases of an engine's counters and histograms between samples, and their sums."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import reduce
from math import fsum
from operator import add
from typing import TypeVar

from agent.analysis.efficiency.engine_observation import counter_increase
from agent.analysis.failures.progress import restart_between
from agent.catalog.engine_facts import (
    DATA_PARALLEL_RANKS,
    ENGINE_FACTS,
    KV_CACHE_USAGE,
    MAX_RUNNING_REQUESTS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    REQUESTS_WAITING_BY_REASON,
)
from agent.catalog.metric import Kind, Metric
from agent.records.engine import EngineSample, HistogramSnapshot
from agent.records.engine_counts import EngineCounts, GaugeSum
from agent.records.gpu import FactKey, Facts

# What came in a longer time between two samples belongs to no minute.
LONGEST_BETWEEN_S = 60.0

_COUNTERS = frozenset(fact.name for fact in ENGINE_FACTS if fact.kind is Kind.COUNTER)
_RANKS = DATA_PARALLEL_RANKS.name
_GAUGES = frozenset(
    fact.name
    for fact in (
        *(REQUESTS_RUNNING, REQUESTS_WAITING, REQUESTS_WAITING_BY_REASON),
        *(KV_CACHE_USAGE, MAX_RUNNING_REQUESTS),
    )
)


def counts_between(before: EngineSample, after: EngineSample) -> EngineCounts | None:
    """What the engine counted between two samples; None if they are too far apart, or in no order.

    None also if a data-parallel rank came: its whole count would be an increase.
    A counter that fell began again at zero, as Prometheus' `increase` has it; so did all of them
    if the process is another one.
    """
    covered_s = after.at - before.at
    if not 0.0 < covered_s <= LONGEST_BETWEEN_S:
        return None
    restarted = restart_between(before, after) is not None
    if not restarted and (before.fact(_RANKS) or 0.0) < (after.fact(_RANKS) or 0.0):
        return None
    old_facts: Facts = {} if restarted else before.facts
    old_histograms: Mapping[str, HistogramSnapshot] = {} if restarted else before.histograms
    return EngineCounts(
        covered_s=covered_s,
        counters={
            key: counter_increase(old_facts.get(key, 0.0), value) or 0.0
            for key, value in after.facts.items()
            if key[0] in _COUNTERS and (restarted or _was_read(key, before))
        },
        gauges={
            key: _gauge(before.facts.get(key), value, covered_s)
            for key, value in after.facts.items()
            if key[0] in _GAUGES
        },
        histograms={
            name: _histogram_increase(old_histograms.get(name), snapshot)
            for name, snapshot in after.histograms.items()
            if restarted or name in old_histograms or name in before.families
        },
    )


def _was_read(key: FactKey, sample: EngineSample) -> bool:
    # A series that an engine has only from its first use on was zero before.
    return (
        key in sample.facts
        or key[0] in sample.families
        or (bool(key[1]) and any(name == key[0] for name, _ in sample.facts))
    )


def _gauge(old: float | None, value: float, covered_s: float) -> GaugeSum:
    mean = value if old is None else (old + value) / 2.0
    return GaugeSum(mean * covered_s, covered_s, value)


def _histogram_increase(
    old: HistogramSnapshot | None, snapshot: HistogramSnapshot
) -> HistogramSnapshot:
    if old is None or old.bounds != snapshot.bounds or old.counts[-1] > snapshot.counts[-1]:
        return snapshot
    counts = [new - before for new, before in zip(snapshot.counts, old.counts, strict=True)]
    return HistogramSnapshot(snapshot.bounds, tuple(counts), snapshot.sum - old.sum)


def total_counts(parts: Iterable[EngineCounts]) -> EngineCounts | None:
    """The sum of the counts of several times; None without any."""
    found = list(parts)
    return reduce(_added, found) if found else None


def _added(first: EngineCounts, second: EngineCounts) -> EngineCounts:
    return EngineCounts(
        covered_s=first.covered_s + second.covered_s,
        counters={
            key: first.counters.get(key, 0.0) + second.counters.get(key, 0.0)
            for key in {**first.counters, **second.counters}
        },
        gauges=_joined(first.gauges, second.gauges, _added_gauges),
        histograms=_joined(first.histograms, second.histograms, added_histograms),
    )


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def _joined(
    first: Mapping[Key, Value], second: Mapping[Key, Value], sum_of: Callable[[Value, Value], Value]
) -> dict[Key, Value]:
    both = first.keys() & second.keys()
    return {**first, **second, **{key: sum_of(first[key], second[key]) for key in both}}


def _added_gauges(first: GaugeSum, second: GaugeSum) -> GaugeSum:
    return GaugeSum(
        first.value_s + second.value_s,
        first.known_s + second.known_s,
        max(first.maximum, second.maximum),
    )


def added_histograms(first: HistogramSnapshot, second: HistogramSnapshot) -> HistogramSnapshot:
    """The counts of both, at the bounds that both have."""
    if first.bounds == second.bounds:
        counts = tuple(map(add, first.counts, second.counts))
        return HistogramSnapshot(first.bounds, counts, first.sum + second.sum)
    mine, yours = (dict(zip(each.bounds, each.counts, strict=True)) for each in (first, second))
    bounds = tuple(sorted(mine.keys() & yours.keys()))
    counts = tuple(mine[bound] + yours[bound] for bound in bounds)
    return HistogramSnapshot(bounds, counts, first.sum + second.sum)


def counted(counts: EngineCounts, metric: Metric) -> float | None:
    """The increase of a counter over all its labels; None if the engine does not count it."""
    found = [value for (name, _), value in counts.counters.items() if name == metric.name]
    return fsum(found) if found else None
