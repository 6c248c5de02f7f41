"""How much a figure of two runs varies, and how probable its change is by chance."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from agent.analysis.comparison.cells import SplitRun
from agent.analysis.comparison.dependence import block_length, block_starts
from agent.analysis.comparison.measures import Measure, Pair
from agent.analysis.comparison.percentiles import MIDDLE, Percentile, bounded
from agent.analysis.comparison.resampling import (
    CONFIDENCE,
    Interval,
    Measured,
    Ratio,
    Shuffles,
    Variation,
    absolute,
    chance,
    chance_of_correlated,
    interval,
    student,
    variation,
)
from agent.records.columns import Array, Integers

# Fewer blocks can hardly show a difference: of 8 and 8, one order in 6,435 is as extreme.
MIN_BLOCKS = 8
NUMBERS = (40, 32, 24, 20, 16, 12, 10, MIN_BLOCKS)
# Of the longer run: all of them are shuffled thousands of times.
_MOST_BLOCKS = 1000
_REQUESTS_PER_BLOCK = 10
# A block that is shorter than its requests shares them with the next one.
_REQUESTS_LONG = 2.0
# The automatic length makes errors of an error small; that an interval holds needs longer blocks.
LONGER = 2.0
# No verdict needs to know whether a chance is even greater.
_NO_CHANCE = 0.2
# Blocks that may be too short are alike: then a mean varies 1.3 times as much.
_ALIKE = 0.25
# Values farther out come in longer bursts: so many levels farther.
_FARTHER = 12
# If a figure may have risen so much, it is not known to be as before.
_TWICE = 2.0
_LITTLE_MORE = 1.5
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


class RunEstimate(NamedTuple):
    """A figure of one run with its interval, of which a bound is NaN if the run is too short.

    `deviations` are those below and above the figure, by which the interval is wide. The run must
    be `needed` times as long, at least, to know both bounds.
    """

    interval: Interval
    deviations: tuple[float, float]
    freedom: float
    needed: float = 1.0

    def varies(self, upwards: bool) -> Variation:
        """How much it varies on one side."""
        return Variation(self.deviations[upwards], 1.0, self.freedom)


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """A figure of both runs, by the blocks that begin with the cells `starts`.

    Each block is correlated with the next one at least by `likeness`. `chance` is how probable such
    a change is if nothing has changed. `like_for_like` is the change of a percentile at the same
    hours and the same load, as a part of `before`.
    """

    pair: Pair
    starts: tuple[Integers, Integers]
    likeness: float
    before: RunEstimate
    after: RunEstimate
    chance: float
    like_for_like: Interval | None = None

    @property
    def filled(self) -> int:
        """How many blocks of each run have anything."""
        return min(self.pair.before.filled, self.pair.after.filled)

    @property
    def needed(self) -> float:
        """How many times as long the runs must be, at least, so that twice as much is found."""
        needed = max(self.before.needed, self.after.needed)
        before, after = self.before, self.after
        values = (before.interval.value, after.interval.value)
        deviations = (before.deviations[0], after.deviations[1])
        is_percentile = isinstance(self.pair.before, Percentile)
        if not is_percentile or min(values) <= 0 or not np.isfinite(deviations).all():
            return needed
        risen = np.log(values[1] / values[0])
        if self.like_for_like is not None:
            risen = np.log1p(self.like_for_like.value)
        error = np.hypot(deviations[0] / values[0], deviations[1] / values[1])
        error *= student(Z, np.array(min(before.freedom, after.freedom)))
        if risen + error < np.log(_TWICE):
            return needed
        return max(needed, float(error / np.log(_TWICE)) ** 2, _LITTLE_MORE)


Runs = tuple[SplitRun, SplitRun]


def by_blocks(measure: Measure, pair: Pair, runs: Runs) -> Evidence:
    """The evidence of runs that have no pattern, or none that could be told."""
    influences = [each.influences() for each in (pair.before, pair.after)]
    longest = max(map(length_of, influences))
    number, likeness, most = _number(runs, longest)
    starts = _starts(runs, number)
    blocks = pair.grouped(*starts)
    figures = (blocks.before, blocks.after)
    jackknifed = [variation(each, each.blocks, likeness) for each in figures]
    before, after = (
        _estimate(measure, figure, varies, np.add.reduceat(influence, of_run), likeness)
        for figure, varies, influence, of_run in zip(
            figures, jackknifed, influences, starts, strict=True
        )
    )
    values = (pair.before.value, pair.after.value)
    found = max(
        chance_of_correlated(values, (jackknifed[0], jackknifed[1]), measure.apart),
        chance_of_intervals(measure, before, after, values),
    )
    if found < _NO_CHANCE:
        shuffles = Shuffles.of(*(each.blocks for each in figures))
        found = max(found, chance(blocks.both, shuffles, measure.apart))
    needed = longest * MIN_BLOCKS / min(each.cells.number for each in runs)
    shortest = _starts(runs, most)
    return Evidence(
        pair=pair.grouped(*shortest),
        starts=shortest,
        likeness=likeness,
        before=_if_long(before, needed),
        after=_if_long(after, needed),
        chance=found,
    )


def _starts(runs: Runs, number: int) -> tuple[Integers, Integers]:
    """The starts of so many blocks of the shorter run, and of equally long ones of the other."""
    numbers = [each.cells.number for each in runs]
    size = max(min(numbers) // number, -(-max(numbers) // _MOST_BLOCKS))
    first, second = (block_starts(each.cells.number, size) for each in runs)
    return first, second


def interval_of(figure: Ratio, run: SplitRun, confidence: float) -> Interval:
    """The interval of a share of one run, whatever its pattern."""
    number, likeness, _ = _number([run], length_of(figure.influences()))
    starts = block_starts(run.cells.number, max(run.cells.number // number, 1))
    blocks = figure.grouped(starts)
    spread = variation(blocks, blocks.blocks, likeness).spread
    return interval(blocks, blocks.blocks, spread, absolute, confidence)


def _estimate(
    measure: Measure, figure: Measured, varies: Variation, influences: Array, likeness: float
) -> RunEstimate:
    if isinstance(figure, Percentile):
        return _of_percentile(figure, influences * np.sqrt((1 + likeness) / (1 - likeness)))
    found = possible(measure, interval(figure, figure.blocks, varies.spread, measure.apart))
    return RunEstimate(found, (varies.deviation, varies.deviation), varies.freedom)


def _of_percentile(figure: Percentile, influences: Array) -> RunEstimate:
    found = bounded(figure, influences, Z)
    wide = float(student(Z, np.array(found.freedom)))
    value = figure.value
    parts = (np.log(value / found.low), np.log(found.high / value)) if value > 0 else (0.0, 0.0)
    lower, upper = (float(each) / wide for each in parts)
    return RunEstimate(
        Interval(value, found.low, found.high),
        (value * lower, value * upper),
        found.freedom,
        found.needed,
    )


def _if_long(estimate: RunEstimate, needed: float) -> RunEstimate:
    """Without bounds if the run must be longer for independent blocks."""
    if needed <= 1:
        return estimate
    unknown = estimate.interval._replace(low=np.nan, high=np.nan)
    return estimate._replace(interval=unknown, needed=max(needed, estimate.needed))


def possible(measure: Measure, found: Interval) -> Interval:
    """No share is above 1."""
    return found._replace(high=min(found.high, 1.0)) if measure.is_share else found


def chance_of_intervals(
    measure: Measure, before: RunEstimate, after: RunEstimate, values: tuple[float, float]
) -> float:
    """By the sides of both intervals that face each other; 0 if one of them is unknown.

    Zou and Donner, "Construction of confidence limits about effect measures" (2008).
    """
    rises = values[1] > values[0]
    facing = (before.varies(rises), after.varies(not rises))
    if not all(np.isfinite(each.deviation) for each in facing):
        return 0.0
    return chance_of_correlated(values, facing, measure.apart)


def length_of(influences: Array) -> float:
    """How long blocks must be, in cells."""
    columns = {min(each, influences.shape[1] - 1) for each in (MIDDLE, MIDDLE + _FARTHER)}
    return max(block_length(influences[:, each]) for each in columns)


def _number(runs: Sequence[SplitRun], longest: float) -> tuple[int, float, int]:
    """As many blocks of the shorter run as can be without each being like the next.

    Also how alike the blocks are at least: if shorter ones are alike, these may be in part; and how
    many blocks there can be, alike or not.
    """
    shorter = min(each.cells.number for each in runs)
    possible = [
        number
        for number in NUMBERS
        if all(_are_long(each, shorter // number * each.cell_s) for each in runs)
    ] or [MIN_BLOCKS]
    for number in possible:
        if shorter // number >= LONGER * longest:
            return number, 0.0 if number == possible[0] else _ALIKE, possible[0]
    return MIN_BLOCKS, _ALIKE, possible[0]


def _are_long(split: SplitRun, block_s: float) -> bool:
    times_s = split.sorted_column("e2e_s").values
    times_s = times_s[np.searchsorted(times_s, 0.0, side="right") :]
    if len(times_s) and block_s < _REQUESTS_LONG * float(times_s[len(times_s) // 2]):
        return False
    return split.run.requests * block_s >= _REQUESTS_PER_BLOCK * split.run.length_s
