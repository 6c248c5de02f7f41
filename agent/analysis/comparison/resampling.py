"""How far apart two runs would be by chance: their blocks are shuffled, and drawn again.

Intervals: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), widened for few blocks
as Hesterberg, "What Teachers Should Know About the Bootstrap" (2015). The test: Good, "Permutation,
Parametric and Bootstrap Tests of Hypotheses" (2005).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple, Protocol, Self

import numpy as np

from agent.records.columns import Array, Integers

# Nothing is divided by 0.
_LEAST = 1e-9


class Measured(Protocol):
    """A figure of a run, also with weighted blocks: a block of weight 2 counts twice."""

    @property
    def value(self) -> float:
        """The figure of the whole run; NaN if it is unknown."""

    @property
    def blocks(self) -> int:
        """How many blocks there are."""

    @property
    def filled(self) -> int:
        """How many blocks have anything."""

    def of(self, weights: Array) -> Array:
        """The figure for each row of `weights`, which has a column for each block."""

    def only(self, blocks: Array) -> "Measured":
        """The figure of some blocks: those of which `blocks` is true."""

    def influences(self) -> Array:
        """How far each block moves the figure; a row each, and a column for each thing measured."""

    def grouped(self, starts: Integers) -> Self:
        """The figure in longer blocks, which begin with these."""


@dataclass(frozen=True, slots=True, eq=False)
class Ratio:
    """A sum over another one, both by block."""

    part: Array
    whole: Array

    @property
    def value(self) -> float:
        """The figure of the whole run; NaN if nothing is divided by."""
        return float(self.of(np.ones((1, len(self.part))))[0])

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return len(self.part)

    @property
    def filled(self) -> int:
        """How many blocks have anything to divide by."""
        return int(np.count_nonzero(self.whole))

    def of(self, weights: Array) -> Array:
        """The figure for each row of `weights`; NaN if nothing is divided by."""
        part, whole = weights @ self.part, weights @ self.whole
        found: Array = np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)
        return found

    def only(self, blocks: Array) -> "Ratio":
        """The figure of some blocks."""
        return Ratio(self.part[blocks], self.whole[blocks])

    def influences(self) -> Array:
        """How far each block moves the figure: one column."""
        found: Array = (self.part - self.value * self.whole) / max(self.whole.sum(), _LEAST)
        return np.nan_to_num(found)[:, np.newaxis]

    def grouped(self, starts: Integers) -> "Ratio":
        """The figure in longer blocks, which begin with these."""
        return Ratio(np.add.reduceat(self.part, starts), np.add.reduceat(self.whole, starts))


def together(first: Ratio, second: Ratio) -> Ratio:
    """One ratio over the blocks of both runs, those of `first` before those of `second`."""
    return Ratio(
        np.concatenate([first.part, second.part]), np.concatenate([first.whole, second.whole])
    )


SHUFFLES = 2000
_DRAWS = 1000
CONFIDENCE = 0.95
_SEED = 14
# Else one block decides all.
_MOST_CORRELATED = 0.75


class Interval(NamedTuple):
    """A value, and where it lies with a confidence of 95 %."""

    value: float
    low: float
    high: float


# How far figures of two runs are apart; NaN if that is unknown.
Apart = Callable[[Array, Array], Array]


def relative(before: Array, after: Array) -> Array:
    """The change as a part of `before`, by its logarithm; unknown if one is 0."""
    known = (before > 0) & (after > 0)
    found: Array = np.full(before.shape, np.nan)
    found[known] = np.log(after[known] / before[known])
    return found


def absolute(before: Array, after: Array) -> Array:
    """The difference."""
    found: Array = after - before
    return found


class Variation(NamedTuple):
    """How much a figure varies from run to run, by the blocks of one run.

    `spread` is how much more it varies than with blocks that are independent of the next ones,
    `freedom` the degrees of freedom of `deviation`: as many as independent blocks, less 1.
    """

    deviation: float
    spread: float
    freedom: float


def variation(figure: Measured, blocks: int, likeness: float) -> Variation:
    """By leaving out each block in turn: the jackknife.

    Blocks are taken as an autoregressive process of first order. In short series its correlation is
    estimated too low: Marriott and Pope, "Bias in the estimation of autocorrelations" (1954).
    """
    without_one = figure.of(1.0 - np.eye(blocks))
    without_one = np.where(np.isfinite(without_one), without_one, figure.value)
    parts = without_one - without_one.mean()
    squares = float(parts @ parts)
    along = float(parts[:-1] @ parts[1:]) / squares if squares > 0 else 0.0
    correlation = (blocks * along + 1) / max(blocks - 4, 1) if squares > 0 else 0.0
    correlation = min(max(correlation, likeness), _MOST_CORRELATED)
    more = (1 + correlation) / (1 - correlation)
    deviation = np.sqrt((blocks - 1) / blocks * squares * more)
    return Variation(float(deviation), float(np.sqrt(more)), max(blocks / more - 1, 2.0))


def interval(
    figure: Measured, blocks: int, spread: float, apart: Apart, confidence: float = CONFIDENCE
) -> Interval:
    """The figure with its bootstrap interval, `spread` times as wide as with independent blocks.

    The same run always gets the same interval.
    """
    drawn = figure.of(_draws(blocks))
    known = drawn[np.isfinite(drawn)]
    if not len(known):
        return Interval(figure.value, np.nan, np.nan)
    tail = _tail(figure.filled, confidence)
    value = figure.value
    low, high = (float(each) for each in np.quantile(known, [tail, 1 - tail]))
    if apart is relative and value > 0 and low > 0:
        low, high = (value * (each / value) ** spread for each in (low, high))
    else:
        low, high = (value + (each - value) * spread for each in (low, high))
    return Interval(value, max(min(low, value), 0.0), max(high, value))


# Two runs of several numbers of blocks, and each without a period of some.
@lru_cache(maxsize=16)
def _draws(blocks: int) -> Array:
    """How often each block is drawn, a row for each draw; the same for all figures of a run."""
    random = np.random.default_rng(_SEED)
    return random.multinomial(blocks, np.full(blocks, 1 / blocks), _DRAWS).astype(float)


def _tail(blocks: int, confidence: float) -> float:
    """The share of draws to leave out at each end.

    Draws from few blocks vary too little: by the factor of the root of (n - 1) / n, and by what
    Student's t is wider than the normal distribution.
    """
    normal, freedom = NormalDist(), max(blocks - 1, 1)
    wide = float(student(normal.inv_cdf((1 + confidence) / 2), np.array(freedom)))
    return normal.cdf(-wide * float(np.sqrt((freedom + 1) / freedom)))


def student(z: float, freedom: Array) -> Array:
    """The quantiles of Student's t that are as far out as `z` is of the normal distribution.

    Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964), 26.7.5.
    """
    found: Array = (
        z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    )
    return found


class Shuffles(NamedTuple):
    """Which blocks of both runs are dealt to `after`, a row each; the first row is the real one."""

    taken: Array

    @classmethod
    @lru_cache(maxsize=8)
    def of(cls, before: int, after: int) -> "Shuffles":
        """The shuffles for so many blocks; always the same, so that lines can be compared."""
        random = np.random.default_rng(_SEED)
        blocks = before + after
        order = random.random((SHUFFLES, blocks)).argsort(axis=1)
        taken = np.zeros((SHUFFLES + 1, blocks))
        taken[0, before:] = 1.0
        np.put_along_axis(taken[1:], order[:, before:], 1.0, axis=1)
        return cls(taken)


def chance(figure: Measured, shuffles: Shuffles, apart: Apart) -> float:
    """How probable it is that two runs of one kind are so far apart: a permutation test.

    `figure` has the blocks of both runs, those of `before` first. 1 if the figure is unknown.
    """
    distances = np.abs(apart(figure.of(1.0 - shuffles.taken), figure.of(shuffles.taken)))
    if not np.isfinite(distances[0]):
        return 1.0
    # Rounding must not make an equal distance a smaller one.
    farther = distances[1:] >= distances[0] * (1 - 1e-12)
    unknown = ~np.isfinite(distances[1:])
    return float(1 + np.count_nonzero(farther | unknown)) / (1 + SHUFFLES)


def chance_of_correlated(
    values: tuple[float, float], variations: tuple[Variation, Variation], apart: Apart
) -> float:
    """The same if each block is like the next one: Welch's test.

    1 if the figure is unknown.
    """
    distance = abs(float(apart(*(np.array([each]) for each in values))[0]))
    if not np.isfinite(distance):
        return 1.0
    scales = values if apart is relative else (1.0, 1.0)
    parts = [(each.deviation / scale) ** 2 for each, scale in zip(variations, scales, strict=True)]
    if sum(parts) <= 0:
        return 0.0
    freedom = sum(parts) ** 2 / sum(
        part**2 / each.freedom for part, each in zip(parts, variations, strict=True)
    )
    # As normal: Wallace, "Bounds on normal approximations to Student's" (1959).
    squared = freedom * np.log1p(distance**2 / sum(parts) / freedom)
    normal = (8 * freedom + 1) / (8 * freedom + 3) * np.sqrt(squared)
    return float(2 * NormalDist().cdf(-float(normal)))


def rejected(chances: Sequence[float], level: float) -> list[bool]:
    """Which of several chances are too small for chance, all together at this level.

    Holm, "A simple sequentially rejective multiple test procedure" (1979).
    """
    order = sorted(range(len(chances)), key=lambda index: chances[index])
    found = [False] * len(chances)
    for rank, index in enumerate(order):
        if chances[index] > level / (len(chances) - rank):
            break
        found[index] = True
    return found
