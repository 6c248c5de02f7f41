"""Bins as exponential histograms of OpenTelemetry, which Prometheus takes as native histograms.

The bins are those of scale 6 (opentelemetry-specification, metrics data model, "Exponential
Scale"); there bucket i holds values in (base**i, base**(i+1)], base = 2**(2**-scale), so our bin b
is bucket b - 1. The lowest bin, which also holds zeros, is the zero bucket.
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


def exponential_from(bins: Bins) -> ExponentialHistogram:
    """The histogram of these bins, without loss. The highest bin also holds larger values."""
    positive = {index: count for index, count in bins.items() if index > LOWEST_BIN}
    zero_count = bins.get(LOWEST_BIN, 0)
    if not positive:
        return ExponentialHistogram(zero_count=zero_count)
    first = min(positive)
    counts = tuple(positive.get(index, 0) for index in range(first, max(positive) + 1))
    return ExponentialHistogram(zero_count=zero_count, offset=first - 1, bucket_counts=counts)
