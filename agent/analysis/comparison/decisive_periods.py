"""A period that makes the difference between two runs, alone.

A burst of a minute can move a percentile of an hour a hundredfold. That is no evidence of a change,
and no reason to call the hour unchanged.
"""

from dataclasses import dataclass

import numpy as np

from agent.analysis.comparison.cells import SplitRun
from agent.analysis.comparison.estimates import Evidence, Runs
from agent.analysis.comparison.measures import Measure
from agent.analysis.comparison.resampling import Measured, interval, variation
from agent.records.columns import Array, Integers

# A burst seldom keeps to one block. Of 40 blocks these are an eighth.
_MOST_BLOCKS = 5
_MOST_OF_RUN = 1 / 8
# The part of the difference that the period makes.
_MADE = 0.5
# Periods that move a figure less are in most pairs of equal runs: a factor, and a difference in
# multiples of what matters.
_LARGE_FACTOR = 2.0
_LARGE_DIFFERENCE = 5.0
# A percentile of fewer requests hangs on a few, which are often in one block: a multiple of those
# that a verdict needs.
_MORE_REQUESTS = 5
# How far the period moves the figure, in half widths of the interval of the rest.
_FAR = 4.0
# Of whole days, in which a busy evening is usual.
_FAR_OF_DAYS = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisivePeriod:
    """A part of one run, in seconds from its begin.

    `value` is the figure of that run without the period, `change` the change of both runs.
    """

    is_after: bool
    begin_s: float
    end_s: float
    value: float
    change: float | None


def decisive_period(measure: Measure, found: Evidence, runs: Runs) -> DecisivePeriod | None:
    """The shortest period that makes at least half of the difference between two runs.

    It also moves the figure of its run far out of the interval of the rest of that run.
    """
    if min(each.run.requests for each in runs) < _MORE_REQUESTS * measure.requests:
        return None
    for length in range(1, _MOST_BLOCKS + 1):
        for is_after in (True, False):
            period = _of_length(length, is_after, measure, found, runs)
            if period is not None:
                return period
    return None


def _of_length(
    length: int, is_after: bool, measure: Measure, found: Evidence, runs: Runs
) -> DecisivePeriod | None:
    pair = found.pair
    figure, other = (pair.after, pair.before) if is_after else (pair.before, pair.after)
    if length > max(figure.blocks * _MOST_OF_RUN, 1):
        return None
    rests = _without_each(figure.blocks, length)
    kept, compared = figure.of(rests), other.of(_same_hours(rests, is_after, found, runs))
    moved = measure.apart(kept, np.full(len(kept), figure.value))
    moved -= measure.apart(compared, np.full(len(kept), other.value))
    first = int(np.argmax(np.abs(np.nan_to_num(moved, nan=0.0))))
    values = float(kept[first]), float(compared[first])
    values = (values[1], values[0]) if is_after else values
    if not _makes_the_difference(measure, (pair.before.value, pair.after.value), values):
        return None
    run, starts = runs[is_after], found.starts[is_after]
    far = _FAR if run.pattern is None else _FAR_OF_DAYS
    rest = figure.only(rests[first] > 0)
    if not _is_far_out(measure, float(moved[first]), rest, found.likeness, far):
        return None
    ends_s = run.ends_s[np.append(starts[1:], run.cells.number) - 1]
    return DecisivePeriod(
        is_after=is_after,
        begin_s=float(ends_s[first - 1]) if first else 0.0,
        end_s=float(ends_s[first + length - 1]),
        value=float(kept[first]),
        change=measure.change(*values),
    )


def _without_each(number: int, length: int) -> Array:
    """The blocks that are left without each period of this length, a row each."""
    starts, blocks = np.arange(number - length + 1)[:, np.newaxis], np.arange(number)
    found: Array = ((blocks < starts) | (blocks >= starts + length)).astype(float)
    return found


def _same_hours(rests: Array, is_after: bool, found: Evidence, runs: Runs) -> Array:
    """The weights of the other run's blocks: without the same hours, if both have a pattern.

    A day without its busiest hour is compared with a day without it.
    """
    of_run, of_other = (_places(each, starts) for each, starts in _turned(is_after, found, runs))
    if of_run is None or of_other is None:
        return np.ones((len(rests), found.starts[not is_after].size))
    number = max(of_run.max(), of_other.max()) + 1
    of_places = np.eye(number)[of_run]
    left: Array = 1 - (1 - rests) @ of_places / np.maximum(of_places.sum(axis=0), 1)
    return left[:, of_other]


def _turned(
    is_after: bool, found: Evidence, runs: Runs
) -> tuple[tuple[SplitRun, Integers], tuple[SplitRun, Integers]]:
    """The run with the period first, and the starts of its blocks."""
    before, after = zip(runs, found.starts, strict=True)
    return (after, before) if is_after else (before, after)


def _places(run: SplitRun, starts: Integers) -> Integers | None:
    """The place of each block in the pattern."""
    if run.pattern is None:
        return None
    size = int(starts[1]) if len(starts) > 1 else 1
    found: Integers = run.pattern.places[starts] // size
    return found


def _is_far_out(
    measure: Measure, moved: float, rest: Measured, likeness: float, far: float
) -> bool:
    """Whether the period moves the figure far, compared with how much the rest varies."""
    spread = variation(rest, rest.blocks, likeness).spread
    usual = interval(rest, rest.blocks, spread, measure.apart)
    bound = usual.high if moved > 0 else usual.low
    width = measure.apart(np.array([usual.value]), np.array([bound]))[0]
    return bool(abs(moved) > far * abs(width))


def _makes_the_difference(
    measure: Measure, whole: tuple[float, float], rest: tuple[float, float]
) -> bool:
    with_it, without_it = (
        float(measure.apart(*(np.array([value]) for value in each))[0]) for each in (whole, rest)
    )
    large = np.log(_LARGE_FACTOR) if measure.is_relative else _LARGE_DIFFERENCE * measure.least
    made = abs(with_it - without_it)
    return made >= max(large, _MADE * abs(with_it), _MADE * abs(without_it))
