"""Merges the histograms of several data-parallel ranks."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from itertools import accumulate
from math import inf, isnan

from agent.records.engine import HistogramSnapshot
from agent.sources.engines.exposition import SeriesValue


def merged_histogram(
    buckets: Collection[SeriesValue], sums: Collection[SeriesValue]
) -> HistogramSnapshot | None:
    """The counts of all ranks added, at the bounds that all ranks have.

    None when a rank's last bucket, the sum, or the number of a bound is missing.
    """
    try:
        ranks = _by_rank(buckets)
    except (KeyError, ValueError):
        return None
    if not sums or any(inf not in counts for counts in ranks):
        return None
    bounds = sorted(frozenset.intersection(*(frozenset(counts) for counts in ranks)))
    counts = [sum(rank[bound] for rank in ranks) for bound in bounds]
    # In an exposition written while requests finish, a bucket can lag one behind a lower bucket.
    return HistogramSnapshot(
        tuple(bounds), tuple(accumulate(counts, max)), sum(sample.value for sample in sums)
    )


def _by_rank(buckets: Collection[SeriesValue]) -> list[Mapping[float, float]]:
    ranks: defaultdict[frozenset[tuple[str, str]], dict[float, float]] = defaultdict(dict)
    for bucket in buckets:
        rank = frozenset((k, v) for k, v in bucket.labels.items() if k != "le")
        ranks[rank][_bound(bucket.labels["le"])] = bucket.value
    return list(ranks.values())


def _bound(le: str) -> float:
    # As a number: "1" and "1.0" are one bound.
    bound = float(le)
    if isnan(bound):
        raise ValueError
    return bound
