"""What a histogram with fixed buckets says of a quantile and of a share: the bounds of both.

The true value lies between `lower` and `upper`, whatever lies where inside a bucket.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import ceil, floor, inf
from typing import NamedTuple

from agent.records.engine import HistogramSnapshot


class Bounds(NamedTuple):
    """Where a value lies. `upper` is None if nothing bounds it; `estimate` interpolates."""

    lower: float
    upper: float | None
    estimate: float | None = None

    def times(self, factor: float) -> "Bounds":
        """The same in another unit."""
        upper = None if self.upper is None else factor * self.upper
        estimate = None if self.estimate is None else factor * self.estimate
        return Bounds(factor * self.lower, upper, estimate)


def quantile_bounds(histogram: HistogramSnapshot, q: float) -> Bounds | None:
    """The bounds of a quantile (0 < q < 1) of what the histogram counted; None without any.

    They hold for the nearest rank and for interpolation between ranks, as numpy has it. The
    estimate is that of Prometheus: linear inside the bucket, and the highest finite bound above it
    (https://prometheus.io/docs/prometheus/latest/querying/functions/#histogram_quantile).
    """
    count = histogram.counts[-1]
    if count <= 0:
        return None
    between = (count - 1.0) * q + 1.0
    nearest = max(ceil(q * count), 1)
    lowest = _bucket_of(histogram.counts, min(floor(between), nearest))
    highest = _bucket_of(histogram.counts, max(ceil(between), nearest))
    upper = histogram.bounds[highest]
    return Bounds(
        lower=_lower_edge(histogram.bounds, lowest),
        upper=None if upper == inf else upper,
        estimate=_interpolated(histogram, q * count),
    )


def _bucket_of(counts: Sequence[float], rank: float) -> int:
    return min(bisect_left(counts, rank), len(counts) - 1)


def _lower_edge(bounds: Sequence[float], bucket: int) -> float:
    return max(bounds[bucket - 1], 0.0) if bucket else 0.0


def _interpolated(histogram: HistogramSnapshot, rank: float) -> float | None:
    bounds, counts = histogram.bounds, histogram.counts
    bucket = _bucket_of(counts, rank)
    if bounds[bucket] == inf:
        return bounds[bucket - 1] if bucket else None
    before = counts[bucket - 1] if bucket else 0.0
    inside = counts[bucket] - before
    low = _lower_edge(bounds, bucket)
    return low + (bounds[bucket] - low) * (rank - before) / inside


class CountsWithin(NamedTuple):
    """How many of all measured values are surely and possibly at most a limit."""

    surely: float
    possibly: float
    measured: float


def counts_within(histogram: HistogramSnapshot, limit: float) -> CountsWithin:
    """By the buckets below the limit, and by the one that it lies in."""
    within = bisect_right(histogram.bounds, limit)
    surely = histogram.counts[within - 1] if within else 0.0
    # A bound at the limit itself leaves nothing open.
    exact = within and histogram.bounds[within - 1] == limit
    possibly = surely if exact else histogram.counts[min(within, len(histogram.counts) - 1)]
    return CountsWithin(surely, possibly, histogram.counts[-1])


def share_bounds(histogram: HistogramSnapshot, limit: float) -> Bounds | None:
    """The bounds of the share that is at most `limit`; None if nothing was counted."""
    surely, possibly, measured = counts_within(histogram, limit)
    return Bounds(surely / measured, possibly / measured) if measured > 0 else None


def all_within(shares: Sequence[Bounds]) -> Bounds | None:
    """The bounds of the share that is within every limit, from the share within each.

    Nothing is known of how they overlap (Fréchet's inequalities): at least `a + b - 1`, at most
    the smallest.
    """
    uppers = [share.upper for share in shares if share.upper is not None]
    if not shares or len(uppers) < len(shares):
        return None
    lower = sum(share.lower for share in shares) - (len(shares) - 1)
    return Bounds(max(lower, 0.0), min(uppers))
