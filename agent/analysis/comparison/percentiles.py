"""A percentile of a run, also of any blocks of it, and its interval.

The interval holds each value that a test does not reject as the percentile: Woodruff, "Confidence
intervals for medians and other position measures" (1952). The test is Wilson's, "Probable
inference" (1927), with the effective number of requests: those of a burst are hardly more evidence
than one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from agent.analysis.comparison.cells import SortedColumn
from agent.analysis.comparison.resampling import student
from agent.records.columns import Array, Integers

# Latencies of 0 have no logarithm.
_LEAST = 1e-9
# Shares of requests that are counted around the percentile, in steps of their logits.
_STEP = 0.1
_STEPS = 40
MIDDLE = _STEPS
# Also counted, since single blocks have other percentiles.
_SHAPE = np.linspace(0.02, 0.98, 25)


@dataclass(frozen=True, slots=True, eq=False)
class Percentile:
    """A percentile of positive values, exact for the whole run.

    `counts` has the values by block and bin; a bin ends with its edge. `edges` are logarithms.
    `levels` are the edges of this run's own percentiles, of which the middle one is this.
    """

    value: float
    quantile: float
    counts: Array
    edges: Array
    levels: Integers

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return len(self.counts)

    @property
    def filled(self) -> int:
        """How many blocks have a value."""
        return int(np.count_nonzero(self.counts.sum(axis=1)))

    @property
    def known(self) -> int:
        """How many values there are."""
        return int(self.counts.sum())

    def of(self, weights: Array) -> Array:
        """The figure for each row of `weights`, interpolated in its bin; NaN without a value."""
        first, last = self._bins_of_blocks()
        few = np.column_stack([self.counts[:, :first].sum(axis=1), self.counts[:, first:last]])
        numbers = weights @ self.counts.sum(axis=1)
        below = np.cumsum(weights @ few, axis=1)
        rank = self.quantile * numbers
        bins = np.argmax(below >= rank[:, np.newaxis] * (1 - 1e-12), axis=1)
        rows = np.arange(len(weights))
        before = np.where(bins > 0, below[rows, bins - 1], 0.0)
        inside = below[rows, bins] - before
        share = np.divide(rank - before, inside, out=np.zeros(len(rank)), where=inside > 0)
        bins = np.maximum(bins + first - 1, 0)
        low, high = self.edges[np.maximum(bins - 1, 0)], self.edges[bins]
        return np.where(numbers > 0, np.exp(low + share * (high - low)), np.nan)

    def _bins_of_blocks(self) -> tuple[int, int]:
        """The bins between which the percentile of any mix of blocks lies."""
        below = np.cumsum(self.counts, axis=1)
        filled = below[below[:, -1] > 0]
        reached = filled >= self.quantile * filled[:, -1:] * (1 - 1e-12)
        bins = np.argmax(reached, axis=1)
        return int(bins.min(initial=len(self.edges))), int(bins.max(initial=0)) + 1

    def only(self, blocks: Array) -> "Percentile":
        """The figure of some blocks, interpolated in its bin."""
        value = float(self.of(blocks[np.newaxis, :].astype(float))[0])
        return Percentile(value, self.quantile, self.counts[blocks], self.edges, self.levels)

    def above(self) -> Array:
        """The share of values above each of the levels."""
        found: Array = 1 - np.cumsum(self.counts.sum(axis=0))[self.levels] / self.known
        return found

    def influences(self) -> Array:
        """How many values above each level a block has too many, as a part of all values."""
        numbers = self.counts.sum(axis=1, keepdims=True)
        over = numbers - np.cumsum(self.counts, axis=1)[:, self.levels]
        found: Array = (over - self.above() * numbers) / self.known
        return found

    def grouped(self, starts: Integers) -> "Percentile":
        """The figure in longer blocks, which begin with these."""
        counts = np.add.reduceat(self.counts, starts, axis=0)
        return Percentile(self.value, self.quantile, counts, self.edges, self.levels)


def percentiles(
    quantile: float, columns: Sequence[SortedColumn], cells: Sequence[int]
) -> tuple[Percentile, ...] | None:
    """A percentile of runs, in the same bins; None if a run has no value."""
    if not all(len(each.values) for each in columns):
        return None
    own = [each.values[_ranks(quantile, len(each.values))] for each in columns]
    shape = [
        each.values[(np.array([0.0, *_SHAPE, 1.0]) * (len(each.values) - 1)).astype(np.intp)]
        for each in columns
    ]
    edges = np.unique(np.concatenate([*own, *shape]))
    logarithms = np.log(np.maximum(edges, _LEAST))
    return tuple(
        Percentile(
            float(levels[MIDDLE]),
            quantile,
            _counts(column, edges, number),
            logarithms,
            np.searchsorted(edges, levels),
        )
        for levels, column, number in zip(own, columns, cells, strict=True)
    )


def _ranks(quantile: float, number: int) -> Integers:
    """The places of the percentiles around one, in sorted values."""
    logits = np.log(quantile / (1 - quantile)) + _STEP * np.arange(-_STEPS, _STEPS + 1)
    # As `inverted_cdf` of numpy; rounding must not take the next one.
    ranks = np.ceil(number / (1 + np.exp(-logits)) - 1e-9).astype(np.intp) - 1
    ranks[MIDDLE] = int(np.ceil(quantile * number - 1e-9)) - 1
    found: Integers = np.clip(ranks, 0, number - 1)
    return found


def _counts(column: SortedColumn, edges: Array, cells: int) -> Array:
    ends = np.searchsorted(column.values, edges, side="right")
    bins = np.repeat(np.arange(len(edges)), np.diff(ends, prepend=0))
    counts = np.bincount(bins * cells + column.cells, minlength=len(edges) * cells)
    found: Array = counts.reshape(len(edges), cells).T.astype(float)
    return found


def both(first: Percentile, second: Percentile) -> Percentile:
    """One percentile over the blocks of both runs; its `value` is that of `second`."""
    counts = np.vstack([first.counts, second.counts])
    return Percentile(second.value, second.quantile, counts, second.edges, second.levels)


class Bounded(NamedTuple):
    """Where a percentile lies: NaN for a bound if no value that the run had can be rejected.

    `freedom` are the degrees of freedom of its standard error. A run must be `needed` times as long
    at least, so that both bounds are known.
    """

    low: float
    high: float
    freedom: float
    needed: float


def bounded(figure: Percentile, influences: Array, z: float) -> Bounded:
    """The interval, `z` standard errors to each side, by the influences of independent blocks."""
    expected = 1 - figure.quantile
    errors, freedom = _errors(figure, influences)
    wide = student(z, freedom)
    lower, upper = slice(MIDDLE, None, -1), slice(MIDDLE, None)
    ends = [_end(figure, (errors * wide)[side], freedom[side], side) for side in (lower, upper)]
    (low, of_low, least), (high, of_high, most) = ends
    needed = max((least / figure.quantile) ** 2, (most / expected) ** 2, 1.0)
    # NaN stays.
    low, high = float(np.minimum(low, figure.value)), float(np.maximum(high, figure.value))
    return Bounded(low, high, min(of_low, of_high), needed)


def _errors(figure: Percentile, influences: Array) -> tuple[Array, Array]:
    """The standard error of the share above each level, if this is the percentile; its freedom."""
    blocks, above, expected = len(influences), figure.above(), 1 - figure.quantile
    squares = (influences**2).sum(axis=0)
    independent = above * (1 - above) / figure.known
    effects = np.ones(len(squares))
    varies = independent > 0
    np.divide(blocks / max(blocks - 1, 1) * squares, independent, out=effects, where=varies)
    errors = np.sqrt(np.maximum(effects, 1.0) * expected * (1 - expected) / figure.known)
    return errors, effective_freedom(influences)


def effective_freedom(influences: Array) -> Array:
    """The degrees of freedom of the variance of a sum, for each column of its blocks.

    A few blocks that have most of it say little of how much they vary: Satterthwaite, "An
    approximate distribution of estimates of variance components" (1946).
    """
    blocks, squares = len(influences), (influences**2).sum(axis=0)
    unequal = (influences**4).sum(axis=0) - squares**2 / blocks
    freedom = np.full(squares.shape, blocks - 1.0)
    np.divide(2 * squares**2, unequal, out=freedom, where=unequal > 0)
    return np.clip(freedom, 2.0, max(blocks - 1.0, 2.0))


def _end(
    figure: Percentile, errors: Array, freedom: Array, side: slice
) -> tuple[float, float, float]:
    """The bound of one side, its freedom, and its greatest error.

    Values far out are few, and may all be of one burst: what lies between counts as well.
    """
    errors = np.maximum.accumulate(errors)
    far = np.maximum.accumulate(np.abs(figure.above()[side] - 1 + figure.quantile) / errors)
    if far[-1] < 1:
        return np.nan, float(freedom.min()), float(errors[-1])
    end = int(np.argmax(far >= 1))
    bound = np.exp(np.interp(1.0, far, figure.edges[figure.levels[side]]))
    return float(bound), float(freedom[: end + 1].min()), float(errors[-1])
