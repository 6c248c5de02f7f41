"""A period that makes the difference between two runs, alone.

A burst of a minute can move a percentile of an hour a hundredfold. That is no evidence of a change,
and no reason to call the hour unchanged.
"""

from dataclasses import dataclass

import numpy as np

from agent.analysis.comparison.measures import Measure, Pair
from agent.analysis.comparison.resampling import Measured, interval, variation
from agent.analysis.comparison.run_columns import SplitRun
from agent.records.columns import Array

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


def decisive_period(
    measure: Measure, pair: Pair, runs: tuple[SplitRun, SplitRun]
) -> DecisivePeriod | None:
    """The shortest period that makes at least half of the difference between two runs.

    It also moves the figure of its run far out of the interval of the rest of that run.
    """
    if min(each.run.requests for each in runs) < _MORE_REQUESTS * measure.requests:
        return None
    for length in range(1, _MOST_BLOCKS + 1):
        for is_after in (True, False):
            found = _of_length(length, is_after, measure, pair, runs)
            if found is not None:
                return found
    return None


def _of_length(
    length: int, is_after: bool, measure: Measure, pair: Pair, runs: tuple[SplitRun, SplitRun]
) -> DecisivePeriod | None:
    run, figure, other = (
        (runs[1], pair.after, pair.before) if is_after else (runs[0], pair.before, pair.after)
    )
    number = run.blocks.number
    if length > max(number * _MOST_OF_RUN, 1):
        return None
    rest = _most_moved(figure, number, length, measure)
    kept = figure.only(rest)
    values = (other.value, kept.value) if is_after else (kept.value, other.value)
    if not _makes_the_difference(measure, (pair.before.value, pair.after.value), values):
        return None
    if not _is_far_out(measure, figure.value, kept, number - length, run.likeness):
        return None
    first = int(np.argmin(rest))
    return DecisivePeriod(
        is_after=is_after,
        begin_s=first * run.block_s,
        end_s=float(run.seconds[: first + length].sum()),
        value=kept.value,
        change=measure.change(*values),
    )


def _is_far_out(
    measure: Measure, value: float, rest: Measured, blocks: int, likeness: float
) -> bool:
    spread = variation(rest, blocks, likeness).spread
    usual = interval(rest, blocks, spread, measure.apart)
    bound = usual.high if value > usual.value else usual.low
    moved, width = np.abs(
        measure.apart(np.array([usual.value, usual.value]), np.array([value, bound]))
    )
    return bool(moved > _FAR * width)


def _most_moved(figure: Measured, number: int, length: int, measure: Measure) -> Array:
    """The blocks that are left without the period that moves the figure most."""
    starts, blocks = np.arange(number - length + 1)[:, np.newaxis], np.arange(number)
    rests = (blocks < starts) | (blocks >= starts + length)
    moved = np.abs(measure.apart(figure.of(rests.astype(float)), np.full(len(rests), figure.value)))
    found: Array = rests[int(np.argmax(np.nan_to_num(moved, nan=0.0)))]
    return found


def _makes_the_difference(
    measure: Measure, whole: tuple[float, float], rest: tuple[float, float]
) -> bool:
    with_it, without_it = (
        float(measure.apart(*(np.array([value]) for value in each))[0]) for each in (whole, rest)
    )
    large = np.log(_LARGE_FACTOR) if measure.is_relative else _LARGE_DIFFERENCE * measure.least
    made = abs(with_it - without_it)
    return made >= max(large, _MADE * abs(with_it), _MADE * abs(without_it))
