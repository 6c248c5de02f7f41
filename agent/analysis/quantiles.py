"""Quantiles from logarithmic bins, and the bins as exponential histograms of OpenTelemetry.

Bins merge by adding counts, and the error is known. They are those of OpenTelemetry exponential
histograms at scale 6 (opentelemetry-specification, metrics data model, "Exponential Buckets"): bin
i holds values in (2**((i-1)/64), 2**(i/64)]. The value reported for a bin lies at most
RELATIVE_ERROR away from every value in it, but for the lowest bin, whose value is zero.

OpenTelemetry's bucket i holds values in (base**i, base**(i+1)], base = 2**(2**-scale), so our bin b
is its bucket b - 1. The lowest bin, which also holds zeros, is the zero bucket. At each lower scale
two neighbouring buckets are one ("Downscaling"). Prometheus reads them as native histograms.
"""

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import ceil, log2

BINS_PER_DOUBLING = 64
RELATIVE_ERROR = (2 ** (1 / BINS_PER_DOUBLING) - 1) / (2 ** (1 / BINS_PER_DOUBLING) + 1)

SMALLEST_S = 1e-6
LARGEST_S = 1e5

# The bins at the ends also hold values beyond them.
LOWEST_BIN = ceil(log2(SMALLEST_S) * BINS_PER_DOUBLING)
HIGHEST_BIN = ceil(log2(LARGEST_S) * BINS_PER_DOUBLING)

# The upper bound of the lowest bin, in seconds.
ZERO_THRESHOLD_S: float = 2 ** (LOWEST_BIN / BINS_PER_DOUBLING)

Bins = Mapping[int, int]


def bin_of(value_s: float) -> int:
    """The bin of a value; values outside SMALLEST_S..LARGEST_S go to the bins at the ends."""
    if value_s <= SMALLEST_S:
        return LOWEST_BIN
    if value_s >= LARGEST_S:
        return HIGHEST_BIN
    return ceil(log2(value_s) * BINS_PER_DOUBLING)


def bins_of(values_s: Sequence[float]) -> dict[int, int]:
    """How many of the values lie in each bin."""
    try:
        # As in `bin_of`, but without interpreting bytecode for each value.
        scaled = map(operator.mul, map(log2, values_s), repeat(float(BINS_PER_DOUBLING)))
        bins = dict(Counter(map(ceil, scaled)))
    except (ValueError, OverflowError):
        bins = {}
    if bins and min(bins) >= LOWEST_BIN and max(bins) <= HIGHEST_BIN:
        return bins
    return dict(Counter(map(bin_of, values_s)))


def value_of(bin_index: int) -> float:
    """The value in the bin with the smallest largest relative error: 2ab/(a+b) for bounds a, b.

    The lowest bin holds zeros and no value above ZERO_THRESHOLD_S: its value is zero.
    """
    if bin_index <= LOWEST_BIN:
        return 0.0
    low = 2 ** ((bin_index - 1) / BINS_PER_DOUBLING)
    high = 2 ** (bin_index / BINS_PER_DOUBLING)
    return float(2 * low * high / (low + high))


def quantile(bins: Bins, q: float) -> float | None:
    """The q-quantile in seconds, within RELATIVE_ERROR of the value at rank ceil(q*n).

    Zero for values up to ZERO_THRESHOLD_S, and None if there are no values.
    """
    total = sum(bins.values())
    if total == 0:
        return None
    rank = max(1, ceil(q * total - 1e-9))
    seen = 0
    for index in sorted(bins):
        seen += bins[index]
        if seen >= rank:
            return value_of(index)
    raise AssertionError(f"rank {rank} lies beyond {total} counted values")


SCALE = BINS_PER_DOUBLING.bit_length() - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentialHistogram:
    """The fields of an ExponentialHistogramDataPoint that bins fill; seconds, none below zero.

    `bucket_counts` are of the positive range, of neighbouring buckets from `offset` on.
    """

    scale: int = SCALE
    zero_count: int = 0
    zero_threshold: float = ZERO_THRESHOLD_S
    offset: int = 0
    bucket_counts: Sequence[int] = ()

    @property
    def count(self) -> int:
        """All values."""
        return self.zero_count + sum(self.bucket_counts)


def relative_error(scale: int) -> float:
    """How far the best value for a bucket lies from the values in it, at most."""
    base: float = 2.0 ** (2.0**-scale)
    return (base - 1) / (base + 1)


def exponential_from(bins: Bins, max_buckets: int | None = None) -> ExponentialHistogram:
    """The histogram of these bins at the highest scale with at most `max_buckets` buckets.

    Without a limit nothing is lost. The highest bin also holds larger values.
    """
    positive = {index - 1: count for index, count in bins.items() if index > LOWEST_BIN}
    zero_count = bins.get(LOWEST_BIN, 0)
    if not positive:
        return ExponentialHistogram(zero_count=zero_count)
    low, high = min(positive), max(positive)
    merged = 0 if max_buckets is None else _merged(low, high, max_buckets)
    offset = low >> merged
    counts = [0] * ((high >> merged) - offset + 1)
    for index, count in positive.items():
        counts[(index >> merged) - offset] += count
    return ExponentialHistogram(
        scale=SCALE - merged, zero_count=zero_count, offset=offset, bucket_counts=tuple(counts)
    )


def _merged(low: int, high: int, max_buckets: int) -> int:
    """How often neighbouring buckets must become one for so few from `low` to `high`."""
    merged = 0
    while (high >> merged) - (low >> merged) >= max_buckets:
        merged += 1
    return merged
