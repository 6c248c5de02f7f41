"""How long blocks must be, so that what they say of a figure is nearly independent.

A figure's influence is a series by cell, of mean 0: how far each cell moves the figure. Its
automatic block length: Politis and White, "Automatic block-length selection for the dependent
bootstrap" (2004), with the correction of Patton, Politis and White (2009), of the circular
bootstrap.
"""

from collections.abc import Sequence

import numpy as np

from agent.analysis.comparison.cells import Pattern
from agent.records.columns import Array, Integers

# Of the standard error of an autocorrelation, within which it is 0.
_WITHIN = 2.0
# So many in a row must be 0, at least.
_IN_A_ROW = 5


def block_length(series: Array) -> float:
    """The automatic block length in cells, 1 or more."""
    number = len(series)
    if number <= 2 * _IN_A_ROW:
        return 1.0
    apart = series - series.mean()
    most = min(int(np.ceil(np.sqrt(number))) + _IN_A_ROW, number - 2)
    covariances = np.correlate(apart, apart, "full")[number - 1 : number + most] / number
    if covariances[0] <= 0:
        return 1.0
    width = _lags(covariances / covariances[0], number)
    lags = np.arange(1, width + 1)
    # A flat top: the first half of the lags has full weight.
    weighted = np.minimum(2 * (1 - lags / width), 1.0) * covariances[1 : width + 1]
    long_run = covariances[0] + 2 * float(weighted.sum())
    longest = float(np.ceil(min(3 * np.sqrt(number), number / 3)))
    if long_run <= 0:
        return 1.0
    slope = 2 * float(lags @ weighted)
    length = (1.5 * (slope / long_run) ** 2 * number) ** (1 / 3)
    return float(np.clip(length, 1.0, longest))


def _lags(correlations: Array, number: int) -> int:
    """How many autocorrelations count: twice as many as there are before several in a row are 0."""
    most = len(correlations) - 1
    small = np.abs(correlations) < _WITHIN * np.sqrt(np.log10(number) / number)
    for lag in range(1, most - _IN_A_ROW + 1):
        if small[lag : lag + _IN_A_ROW].all():
            return min(2 * lag, most)
    return most


def block_starts(cells: int, size: int) -> Integers:
    """The first cell of each block; what is left over belongs to the last block."""
    return np.arange(0, max(cells // size, 1) * size, size)


def without_pattern(influences: Sequence[Array], patterns: Sequence[Pattern]) -> tuple[Array, ...]:
    """The influences without what the same hours of all days have in common.

    What is left of so few days varies too little, and is made larger for that.
    """
    # A run's cells weigh in the figure by their part of the run, so that of many days weighs less.
    scaled = [each * of.periods for each, of in zip(influences, patterns, strict=True)]
    places = np.concatenate([each.places for each in patterns])
    together = np.concatenate(scaled)
    counts = np.bincount(places, minlength=patterns[0].number)
    columns = together.reshape(len(together), -1)
    sums = np.zeros((len(counts), columns.shape[1]))
    np.add.at(sums, places, columns)
    means = sums / np.maximum(counts, 1)[:, np.newaxis]
    days = counts[places][:, np.newaxis]
    left = (columns - means[places]) * np.sqrt(days / np.maximum(days - 1, 1))
    ends = np.cumsum([len(each) for each in influences])[:-1]
    return tuple(
        part.reshape(each.shape) / of.periods
        for part, each, of in zip(np.split(left, ends), influences, patterns, strict=True)
    )
