"""Runs of whole days: each hour is compared with the same hour of the other run.

A day's pattern moves every figure further than most changes do. What is left without it is compared
(a paired test), and without what follows the load: how steeply a percentile rises with it is known
from the hours that had more or less than usual (an analysis of covariance: Fisher, "Statistical
Methods for Research Workers", 1932).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from agent.analysis.comparison.cells import Pattern, SplitRun
from agent.analysis.comparison.dependence import block_starts, without_pattern
from agent.analysis.comparison.estimates import (
    LONGER,
    MIN_BLOCKS,
    NUMBERS,
    Evidence,
    RunEstimate,
    Runs,
    Z,
    by_blocks,
    chance_of_intervals,
    length_of,
    possible,
)
from agent.analysis.comparison.measures import Measure, Pair
from agent.analysis.comparison.percentiles import Percentile, effective_freedom
from agent.analysis.comparison.resampling import Interval, Measured, student
from agent.records.columns import Array

# Two days differ for reasons that neither shows alone: a part of the change that matters.
_OF_DAY = 2 / 3
# How steeply a percentile rises with the load, and how much more so in busy hours.
_TERMS = 2
# Of a variance, by what is known beforehand: a factor.
_MOST_MORE = 10.0
# Requests of an hour, without which it has no median; a percentile needs one beyond it.
_LEAST_OF_HOUR = 5
# Hours that both runs know.
_LEAST_HOURS = 12
# An hour without requests has a logarithm.
_LEAST_LOAD = 1e-6
# Blocks of which each is left out in turn: the hours of a week.
_MOST_HOURS = 168


def evidence_of(measure: Measure, runs: Runs) -> Evidence | None:
    """By the clock if both runs have a pattern, else by blocks; None if one lacks the figure."""
    pair = measure.pair(*runs)
    if pair is None:
        return None
    patterns = [each.pattern for each in runs if each.pattern is not None]
    found = None
    if len(patterns) == len(runs):
        found = _by_clock(measure, pair, runs, patterns)
    return by_blocks(measure, pair, runs) if found is None else found


def _by_clock(
    measure: Measure, pair: Pair, runs: Runs, patterns: Sequence[Pattern]
) -> Evidence | None:
    """None if too few hours have requests."""
    if isinstance(pair.before, Percentile) and isinstance(pair.after, Percentile):
        found = _of_percentiles(measure, (pair.before, pair.after), runs, patterns)
    else:
        found = _of_ratios(measure, (pair.before, pair.after), patterns)
    if found is None:
        return None
    size = -(-max(each.cells.number for each in runs) // _MOST_HOURS)
    first, second = (block_starts(each.cells.number, size) for each in runs)
    return Evidence(
        pair=pair.grouped(first, second),
        starts=(first, second),
        likeness=0.0,
        before=found.before,
        after=found.after,
        chance=found.chance,
        like_for_like=found.like_for_like,
    )


class _Found(NamedTuple):
    before: RunEstimate
    after: RunEstimate
    chance: float
    like_for_like: Interval | None = None


def _of_ratios(
    measure: Measure, figures: Sequence[Measured], patterns: Sequence[Pattern]
) -> _Found:
    influences = without_pattern([each.influences() for each in figures], patterns)
    before, after = (
        _of_days(measure, figure.value, influence, of)
        for figure, influence, of in zip(figures, influences, patterns, strict=True)
    )
    values = (before.interval.value, after.interval.value)
    return _Found(before, after, chance_of_intervals(measure, before, after, values))


def _of_days(
    measure: Measure,
    value: float,
    influences: Array,
    pattern: Pattern,
    *,
    of_load: float = 0.0,
    lost: int = 0,
) -> RunEstimate:
    """Of influences of hours without a pattern, in units of the figure.

    `of_load` is the standard error of what the load makes, as a part of the figure. That it was
    estimated has `lost` so many degrees of freedom.
    """
    longest, cells = length_of(influences), len(influences)
    number = int(np.clip(cells / longest / LONGER, MIN_BLOCKS, NUMBERS[0]))
    sums = np.add.reduceat(influences, block_starts(cells, cells // number))
    left = len(sums) - 1 - lost
    squares = len(sums) / left * float((sums**2).sum())
    scale = value if measure.is_relative else 1.0
    of_day = _OF_DAY * measure.least_of_day / np.sqrt(pattern.days)
    of_day = scale * float(np.hypot(of_day, of_load))
    deviation = float(np.hypot(np.sqrt(squares), of_day))
    # What both runs have in common was taken away. What is known beforehand has no freedom to lose:
    # Satterthwaite (1946).
    freedom = min(float(effective_freedom(sums)[0]), left) * (1 - 1 / pattern.repeated)
    if squares * _MOST_MORE > deviation**2:
        freedom *= (deviation**2 / squares) ** 2
    else:
        freedom *= _MOST_MORE**2
    wide = deviation * float(student(Z, np.array(freedom)))
    ends = Interval(value, max(value - wide, 0.0), value + wide)
    if measure.is_relative and value > 0:
        factor = float(np.exp(wide / value))
        ends = Interval(value, value / factor, value * factor)
    return RunEstimate(possible(measure, ends), (deviation, deviation), freedom)


def _of_percentiles(
    measure: Measure,
    figures: tuple[Percentile, Percentile],
    runs: Runs,
    patterns: Sequence[Pattern],
) -> _Found | None:
    """By the logarithms of the percentile of each hour.

    The percentile of a whole day is that of its busiest hours. How much these vary, one day does
    not tell, so that it has no interval; their change has one.
    """
    logarithms = [_logarithms(each) for each in figures]
    shared = _shared(logarithms, patterns)
    if min(int(each.sum()) for each in shared) < _LEAST_HOURS:
        return None
    levels, loads = (
        [np.where(known, each, np.nan) for each, known in zip(of_runs, shared, strict=True)]
        for of_runs in (logarithms, [_load(each) for each in runs])
    )
    change = float(np.nanmean(levels[1]) - np.nanmean(levels[0]))
    influences, of_load = without_pattern([_parts(each) for each in levels], patterns), 0.0
    if measure.follows_load:
        influences, made, of_load = _without_load(influences, loads, patterns)
        change -= made
    lost = _TERMS if of_load else 0
    before, after = (
        _of_days(
            measure,
            figure.value,
            influence * figure.value,
            of,
            of_load=of_load / np.sqrt(2),
            lost=lost,
        )
        for figure, influence, of in zip(figures, influences, patterns, strict=True)
    )
    values = (before.interval.value, before.interval.value * float(np.exp(change)))
    chance = chance_of_intervals(measure, before, after, values)
    return _Found(_alone(before), _alone(after), chance, _change(change, before, after))


def _alone(found: RunEstimate) -> RunEstimate:
    return found._replace(interval=found.interval._replace(low=np.nan, high=np.nan))


def _change(change: float, before: RunEstimate, after: RunEstimate) -> Interval:
    """As a part of what it was."""
    first, second = (each.deviations[0] / each.interval.value for each in (before, after))
    wide = np.hypot(first, second) * student(Z, np.array(before.freedom + after.freedom))
    value, low, high = (float(np.expm1(each)) for each in (change, change - wide, change + wide))
    return Interval(value, low, high)


def _logarithms(figure: Percentile) -> Array:
    """The logarithm of the percentile in each hour; NaN with too few requests."""
    numbers = figure.counts.sum(axis=1)
    values = figure.of(np.eye(figure.blocks))
    known = numbers >= max(_LEAST_OF_HOUR, 1 / (1 - figure.quantile))
    found: Array = np.full(figure.blocks, np.nan)
    np.log(values, out=found, where=known & (values > 0))
    return found


def _shared(levels: Sequence[Array], patterns: Sequence[Pattern]) -> list[Any]:
    """Which hours are of a place that is known in all periods of both runs."""
    unknown = np.concatenate(
        [of.places[np.isnan(each)] for each, of in zip(levels, patterns, strict=True)]
    )
    return [np.isin(of.places, unknown, invert=True) for of in patterns]


def _parts(levels: Array) -> Array:
    """What each hour adds to the mean of the known ones."""
    columns = levels.reshape(len(levels), -1)
    number = np.count_nonzero(np.isfinite(columns[:, 0]))
    found: Array = np.nan_to_num((columns - np.nanmean(columns, axis=0)) / number)
    return found


def _without_load(
    influences: Sequence[Array], loads: Sequence[Array], patterns: Sequence[Pattern]
) -> tuple[tuple[Array, ...], float, float]:
    """The influences without what follows the load.

    Also the change that the load makes, with its standard error. How steeply a figure rises with
    the load is known from hour to hour. It is steeper in busy hours.
    """
    usual = _usual(loads, patterns)
    terms = [
        np.column_stack([load, load * (usual[of.places] - np.nanmean(usual))])
        for load, of in zip(loads, patterns, strict=True)
    ]
    within = without_pattern([_parts(each) for each in terms], patterns)
    scaled = [
        [each * of.periods for each, of in zip(of_runs, patterns, strict=True)]
        for of_runs in (within, influences)
    ]
    x, y = np.concatenate(scaled[0]), np.concatenate(scaled[1])[:, 0]
    slopes, *_ = np.linalg.lstsq(x, y)
    apart = np.nanmean(terms[1], axis=0) - np.nanmean(terms[0], axis=0)
    made = float(apart @ slopes)
    # Less load makes nothing slower.
    if made * apart[0] <= 0:
        return tuple(influences), 0.0, 0.0
    left = (
        each - (of_run @ slopes)[:, np.newaxis]
        for each, of_run in zip(influences, within, strict=True)
    )
    repeated = patterns[0].repeated
    variance = float(((y - x @ slopes) ** 2).mean()) * repeated / (repeated - 1)
    return tuple(left), made, float(np.sqrt(variance * (apart @ np.linalg.pinv(x.T @ x) @ apart)))


def _usual(loads: Sequence[Array], patterns: Sequence[Pattern]) -> Array:
    """The mean load at each place of the pattern; NaN if it is unknown."""
    places = np.concatenate([each.places for each in patterns])
    sums = np.bincount(places, np.concatenate(loads), patterns[0].number)
    return sums / np.maximum(np.bincount(places, minlength=patterns[0].number), 1)


def _load(split: SplitRun) -> Array:
    """The logarithm of input tokens per second in each hour; of requests if tokens are unknown."""
    tokens = split.run.input_tokens
    known = tokens if np.isfinite(tokens).all() else np.ones(split.run.requests)
    per_s = split.cells.sums(known) / np.maximum(split.seconds, 1.0)
    return np.log(np.maximum(per_s, _LEAST_LOAD))
