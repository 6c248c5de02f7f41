"""Figures of a run, also with weighted blocks: a block of weight 2 counts twice."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from agent.analysis.comparison.blocks import Blocks
from agent.records.columns import Array

_BINS = 128
# Latencies of 0 have no logarithm.
_LEAST = 1e-9


class Measured(Protocol):
    """A figure of a run, also with weighted blocks: a block of weight 2 counts twice."""

    @property
    def value(self) -> float:
        """The figure of the whole run; NaN where it is unknown."""

    @property
    def filled(self) -> int:
        """How many blocks have anything."""

    def of(self, weights: Array) -> Array:
        """The figure for each row of `weights`, which has a column for each block."""


@dataclass(frozen=True, slots=True, eq=False)
class Ratio:
    """A sum over another one, both by block."""

    part: Array
    whole: Array

    @property
    def value(self) -> float:
        """The figure of the whole run; NaN where nothing is divided by."""
        return float(self.of(np.ones((1, len(self.part))))[0])

    @property
    def filled(self) -> int:
        """How many blocks have anything to divide by."""
        return int(np.count_nonzero(self.whole))

    def of(self, weights: Array) -> Array:
        """The figure for each row of `weights`; NaN where nothing is divided by."""
        part, whole = weights @ self.part, weights @ self.whole
        found: Array = np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)
        return found


def together(first: Ratio, second: Ratio) -> Ratio:
    """One ratio over the blocks of both runs, those of `first` before those of `second`."""
    return Ratio(
        np.concatenate([first.part, second.part]), np.concatenate([first.whole, second.whole])
    )


@dataclass(frozen=True, slots=True, eq=False)
class Percentile:
    """A percentile of positive values, exact for the whole run.

    `counts` has the values by block and bin; the first and the last bin have no width. `edges` are
    the logarithms of the bounds of the others.
    """

    value: float
    quantile: float
    counts: Array
    edges: Array

    @property
    def filled(self) -> int:
        """How many blocks have a value."""
        return int(np.count_nonzero(self.counts.sum(axis=1)))

    def of(self, weights: Array) -> Array:
        """The figure for each row of `weights`, interpolated in its bin; NaN without a value."""
        below = np.cumsum(weights @ self.counts, axis=1)
        rank = self.quantile * below[:, -1]
        bins = np.argmax(below >= rank[:, np.newaxis] * (1 - 1e-12), axis=1)
        rows = np.arange(len(weights))
        before = np.where(bins > 0, below[rows, bins - 1], 0.0)
        inside = below[rows, bins] - before
        share = np.divide(rank - before, inside, out=np.zeros(len(rank)), where=inside > 0)
        low = self.edges[np.clip(bins - 1, 0, _BINS)]
        high = self.edges[np.clip(bins, 0, _BINS)]
        return np.where(below[:, -1] > 0, np.exp(low + share * (high - low)), np.nan)


def percentiles(
    quantile: float, values: Sequence[Array], blocks: Sequence[Blocks]
) -> tuple[Percentile, ...] | None:
    """A percentile of the known values of runs, in the same bins; None where a run has none.

    The percentile of any blocks together lies between the least and the greatest of any of them, so
    only values between these need bins.
    """
    groups = [list(of.groups(each)) for each, of in zip(values, blocks, strict=True)]
    known = [np.concatenate(of_run) for of_run in groups]
    if not all(len(each) for each in known):
        return None
    found = [_quantile(each, quantile) for of_run in groups for each in of_run if len(each)]
    edges = np.linspace(np.log(max(min(found), _LEAST)), np.log(max(*found, _LEAST)), _BINS + 1)
    return tuple(
        Percentile(_quantile(all_of, quantile), quantile, _counts(of_run, edges), edges)
        for all_of, of_run in zip(known, groups, strict=True)
    )


def _quantile(values: Array, quantile: float) -> float:
    return float(np.quantile(values, quantile, method="inverted_cdf"))


def _counts(groups: Sequence[Array], edges: Array) -> Array:
    counts = np.zeros((len(groups), len(edges) + 1))
    for row, values in zip(counts, groups, strict=True):
        # Rounding must not put the least or the greatest one outside.
        logarithms = np.log(np.maximum(values, _LEAST))
        places = np.searchsorted(edges, logarithms, side="right")
        row += np.bincount(places, minlength=len(row))
    return counts


def both(first: Percentile, second: Percentile) -> Percentile:
    """One percentile over the blocks of both runs; its `value` is that of `second`."""
    counts = np.vstack([first.counts, second.counts])
    return Percentile(second.value, second.quantile, counts, second.edges)
