"""Compares two runs: a verdict for each figure, and one for all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from agent.analysis.comparison.cells import split_runs
from agent.analysis.comparison.days import evidence_of
from agent.analysis.comparison.decisive_periods import DecisivePeriod, decisive_period
from agent.analysis.comparison.estimates import Evidence, Runs
from agent.analysis.comparison.facts import Fact, FirstFailures, facts_of
from agent.analysis.comparison.measures import (
    ATTAINMENT,
    IN_FLIGHT,
    LENGTHS,
    LOAD_MEASURES,
    MEASURES,
    REQUEST_RATE,
    Better,
    Measure,
    Quantity,
)
from agent.analysis.comparison.resampling import Interval, rejected
from agent.analysis.comparison.run_columns import RunColumns, RunFigures
from agent.analysis.histogram_bounds import Bounds

# The share of comparisons in which any line says better or worse by chance.
_LEVEL = 0.05
# To miss a change of the load is worse than to suspect one: then no figure is judged.
_LOAD_LEVEL = 0.15
# Fewer blocks with a value cannot show a difference at this level.
_LEAST_FILLED = 6
# With a constant time of service they change alike, with queues the requests in flight change more.
_WITH_THE_RATE = 0.5


class Outcome(StrEnum):
    """What a comparison says of a figure, or of all."""

    BETTER = "better"
    WORSE = "worse"
    CHANGED = "changed"
    ONE_PERIOD = "one period"
    NO_EVIDENCE = "no evidence"
    LOAD_CHANGED = "load changed"
    TOO_FEW = "too few"
    TOO_SHORT = "too short"
    UNKNOWN = "unknown"


# Of all lines together, the first that any line has.
_WHOLE = (
    *(Outcome.WORSE, Outcome.ONE_PERIOD, Outcome.BETTER, Outcome.NO_EVIDENCE),
    *(Outcome.TOO_SHORT, Outcome.TOO_FEW),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedLine:
    """One figure of both runs, None if it is unknown; without requests it has no bounds.

    `change` is a part of the figure before or a difference, as the measure says. `like_for_like` is
    the change at the same hours and the same load, by which whole days are judged. `chance` is how
    probable such a change is if nothing has changed. `period` makes the difference alone. The runs
    must be `needed` times as long for a verdict, at least.
    """

    measure: Measure
    before: Interval | None
    after: Interval | None
    change: float | None = None
    like_for_like: Interval | None = None
    chance: float | None = None
    period: DecisivePeriod | None = None
    needed: float | None = None
    outcome: Outcome = Outcome.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All lines. `load_changes` names what changed of the load, `facts` what is worse by itself.

    `causes` are shares of the requests that missed, by their first cause, before and after; None
    if none was looked for.
    """

    before: RunColumns | RunFigures
    after: RunColumns | RunFigures
    load: tuple[ComparedLine, ...]
    lines: tuple[ComparedLine, ...]
    load_changes: tuple[str, ...]
    outcome: Outcome
    facts: tuple[Fact, ...] = ()
    causes: Mapping[str, tuple[float, float]] | None = None


def compare(before: RunColumns, after: RunColumns) -> Comparison:
    """Compare two runs of at least one request each.

    If the load changed, figures that depend on it say so instead of better or worse. Facts are
    worse whatever the figures are.
    """
    runs = split_runs(before, after)
    evidence = {each: evidence_of(each, runs) for each in (*LOAD_MEASURES, *MEASURES)}

    def lines(measures: Sequence[Measure], level: float) -> list[ComparedLine]:
        return _judged([_line(each, runs, evidence[each]) for each in measures], level)

    load, figures = lines(LOAD_MEASURES, _LOAD_LEVEL), lines(MEASURES, _LEVEL)
    changes = (*_configured(before, after), *_moved(load))
    if changes:
        figures = [_of_the_load(line) for line in figures]
    else:
        figures = [_of_one_period(line, evidence[line.measure], runs) for line in figures]
        figures = [_if_long(line, evidence[line.measure]) for line in figures]
    facts = facts_of(before, after)
    figures = [_with_facts(line, _worse(facts, changes)) for line in figures]
    return Comparison(
        before=before,
        after=after,
        load=tuple(load),
        lines=tuple(figures),
        load_changes=changes,
        outcome=_whole(figures, facts, changes),
        facts=facts,
        causes=_causes(before, after),
    )


def compare_figures(before: RunColumns | RunFigures, after: RunColumns | RunFigures) -> Comparison:
    """Both runs side by side, of which one or both are known by their figures alone.

    Without single requests it is unknown how much a figure varies, so only facts give a verdict.
    """
    figures = [_figures(each) for each in (before, after)]

    def side_by_side(measures: Sequence[Measure]) -> list[ComparedLine]:
        return [
            _without_evidence(each, *(known.get(each.name) for known in figures))
            for each in measures
        ]

    changes, facts = _configured(before, after), facts_of(before, after)
    lines = [_with_facts(line, _worse(facts, changes)) for line in side_by_side(MEASURES)]
    return Comparison(
        before=before,
        after=after,
        load=tuple(side_by_side(LOAD_MEASURES)),
        lines=tuple(lines),
        load_changes=changes,
        outcome=_whole(lines, facts, changes),
        facts=facts,
    )


def _figures(run: RunColumns | RunFigures) -> Mapping[str, Interval]:
    if isinstance(run, RunFigures):
        points = {name: Interval(value, np.nan, np.nan) for name, value in run.figures.items()}
        return points | {name: _between(each) for name, each in run.bounds.items()}
    alone, _ = split_runs(run, run)
    pairs = {each.name: each.pair(alone, alone) for each in (*LOAD_MEASURES, *MEASURES)}
    return {
        name: Interval(pair.before.value, np.nan, np.nan)
        for name, pair in pairs.items()
        if pair is not None
    }


def _between(bounds: Bounds) -> Interval:
    """Without a value where only the bounds are known."""
    value = np.nan if bounds.estimate is None else bounds.estimate
    return Interval(value, bounds.lower, np.inf if bounds.upper is None else bounds.upper)


def _without_evidence(
    measure: Measure, before: Interval | None, after: Interval | None
) -> ComparedLine:
    change = None
    if before is not None and after is not None and not _overlap(before, after):
        change = measure.change(before.value, after.value)
    return ComparedLine(measure=measure, before=before, after=after, change=change)


def _overlap(before: Interval, after: Interval) -> bool:
    """Whether both may be the same value; False if no bounds are known.

    A value without bounds of its own is inside the bounds of the other or not.
    """
    if np.isnan(before.low) and np.isnan(after.low):
        return False
    first, second = (
        each._replace(low=each.value, high=each.value) if np.isnan(each.low) else each
        for each in (before, after)
    )
    if first.low == first.high or second.low == second.high:
        return first.low <= second.high and second.low <= first.high
    return first.low < second.high and second.low < first.high


def _line(measure: Measure, runs: Runs, found: Evidence | None) -> ComparedLine:
    if found is None:
        return ComparedLine(measure=measure, before=None, after=None)
    before, after = found.before.interval, found.after.interval
    line = ComparedLine(
        measure=measure,
        before=before,
        after=after,
        change=measure.change(before.value, after.value),
        like_for_like=found.like_for_like,
    )
    requests = [each.run.requests for each in runs]
    if found.filled < _LEAST_FILLED or min(requests) < measure.requests:
        return replace(line, outcome=Outcome.TOO_FEW, needed=measure.requests / min(requests))
    return replace(line, chance=found.chance, outcome=Outcome.NO_EVIDENCE)


def _judged(lines: Sequence[ComparedLine], level: float) -> list[ComparedLine]:
    """With the verdicts of those lines whose change is too improbable for chance."""
    found = list(lines)
    asked = [index for index, line in enumerate(found) if line.chance is not None]
    evident = rejected([found[index].chance or 0.0 for index in asked], level)
    for index, is_evident in zip(asked, evident, strict=True):
        line = found[index]
        change = line.change if line.like_for_like is None else line.like_for_like.value
        if is_evident and change is not None and abs(change) > line.measure.least:
            found[index] = replace(line, outcome=_direction(line.measure.better, change))
    return found


def _direction(better: Better, change: float) -> Outcome:
    if better is Better.NEITHER:
        return Outcome.CHANGED
    rises = change > 0
    return Outcome.BETTER if rises is (better is Better.HIGHER) else Outcome.WORSE


def _configured(before: RunColumns | RunFigures, after: RunColumns | RunFigures) -> tuple[str, ...]:
    """The settings of the load generator that differ, of those that both runs have."""
    first, second = before.configured_load, after.configured_load
    return tuple(
        f"{name} {first[name]} -> {second[name]}"
        for name in first
        if name in second and first[name] != second[name]
    )


def _moved(load: Sequence[ComparedLine]) -> tuple[str, ...]:
    """The figures of the load that changed by themselves.

    Slower service lowers the rate of a constant number of clients, and lets requests pile up at a
    constant rate. Only if requests in flight change about as much as the rate, or more, there is
    more or less load.
    """
    lines = {line.measure: line for line in load}
    changed = [each for each in LENGTHS if lines[each].outcome is Outcome.CHANGED]
    rate, in_flight = lines[REQUEST_RATE].change, lines[IN_FLIGHT].change
    if lines[REQUEST_RATE].outcome is Outcome.CHANGED and rate:
        # If it is unknown how many are in flight, it may be the load.
        together = _WITH_THE_RATE if in_flight is None else in_flight / rate
        changed = [REQUEST_RATE, IN_FLIGHT] * (together >= _WITH_THE_RATE) + changed
    return tuple(f"{each.name} {lines[each].change or 0.0:+.0%}" for each in changed)


def _of_the_load(line: ComparedLine) -> ComparedLine:
    if line.outcome in (Outcome.BETTER, Outcome.WORSE):
        return replace(line, outcome=Outcome.LOAD_CHANGED)
    return line


def _of_one_period(line: ComparedLine, found: Evidence | None, runs: Runs) -> ComparedLine:
    """The line with the period that makes its difference, if there is one.

    A permutation test finds no evidence in one period, so lines with evidence need no search.
    Events are few, and always in some period.
    """
    is_event = line.measure.quantity is Quantity.PER_HOUR
    if line.outcome is not Outcome.NO_EVIDENCE or is_event or found is None:
        return line
    period = decisive_period(line.measure, found, runs)
    return line if period is None else replace(line, period=period, outcome=Outcome.ONE_PERIOD)


def _if_long(line: ComparedLine, found: Evidence | None) -> ComparedLine:
    """The line, or that the runs are too short: a latency twice as high would not be noticed."""
    if line.outcome is not Outcome.NO_EVIDENCE or found is None:
        return line
    needed = found.needed
    if needed > 1 and (line.measure.is_latency or line.measure.name == ATTAINMENT):
        return replace(line, outcome=Outcome.TOO_SHORT, needed=needed)
    return line


def _worse(facts: Sequence[Fact], load_changes: Sequence[str]) -> list[Fact]:
    """The facts by which the run is worse."""
    return [each for each in facts if each.is_evident and not (load_changes and each.may_be_load)]


def _with_facts(line: ComparedLine, worse: Sequence[Fact]) -> ComparedLine:
    """Attainment of all requests may rise while one objective misses its target."""
    if not line.change or _direction(line.measure.better, line.change) is not Outcome.WORSE:
        return line
    named = any(each.line == line.measure.name for each in worse)
    return replace(line, outcome=Outcome.WORSE) if named else line


def _whole(
    lines: Sequence[ComparedLine], facts: Sequence[Fact], load_changes: Sequence[str]
) -> Outcome:
    """Worse if anything is worse."""
    worse = _worse(facts, load_changes)
    if worse:
        return Outcome.WORSE
    if any(isinstance(each, FirstFailures) and each.is_of_few_bursts for each in facts):
        return Outcome.ONE_PERIOD
    if load_changes:
        return Outcome.LOAD_CHANGED
    found = {line.outcome for line in lines}
    if any(line.measure.is_median and line.outcome is Outcome.TOO_SHORT for line in lines):
        # Of a latency nothing is known: that no other figure is worse does not make up for it.
        found.discard(Outcome.NO_EVIDENCE)
    for outcome in _WHOLE:
        if outcome in found:
            return outcome
    return Outcome.UNKNOWN


def _causes(before: RunColumns, after: RunColumns) -> dict[str, tuple[float, float]] | None:
    first, second = before.causes, after.causes
    if first is None or second is None:
        return None
    return {
        name: (first.get(name, 0) / before.requests, second.get(name, 0) / after.requests)
        for name in {**first, **second}
    }
