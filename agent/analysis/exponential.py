"""Bins as exponential histograms of OpenTelemetry, which Prometheus takes as native histograms.

The bins are those of scale 6 (opentelemetry-specification, metrics data model, "Exponential
Scale"); there bucket i holds values in (base**i, base**(i+1)], base = 2**(2**-scale), so our bin b
is bucket b - 1. The lowest bin, which also holds zeros, is the zero bucket. At each lower scale two
neighbouring buckets are one (the same, "Downscaling").
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agent.analysis.quantiles import BINS_PER_DOUBLING, LOWEST_BIN, ZERO_THRESHOLD_S, Bins

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
