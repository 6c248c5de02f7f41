from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.records.engine import HistogramSnapshot
from agent.sources.engines.engine_histograms import merged_histogram
from agent.sources.engines.exposition import SeriesValue

Rank = tuple[list[float], list[float]]

seconds = st.integers(0, 50).map(lambda tenths: tenths / 10)
ranks_of_engines = st.lists(
    st.tuples(st.lists(seconds, max_size=30), st.lists(seconds, unique=True, max_size=8)),
    min_size=1,
    max_size=4,
)


def buckets(rank: int, observations: list[float], bounds: list[float]) -> list[SeriesValue]:
    """A rank's buckets, its whole bounds spelled both ways in turn."""
    spelled = {f"{bound:g}" if rank % 2 else str(bound): bound for bound in bounds} | {"+Inf": inf}
    return [
        SeriesValue({"engine": str(rank), "le": le}, float(sum(o <= bound for o in observations)))
        for le, bound in spelled.items()
    ]


def merged(ranks: list[Rank]) -> HistogramSnapshot | None:
    sums = [SeriesValue({"engine": str(n)}, sum(seen)) for n, (seen, _) in enumerate(ranks)]
    every = [
        bucket for n, (seen, bounds) in enumerate(ranks) for bucket in buckets(n, seen, bounds)
    ]
    return merged_histogram(every, sums)


@given(ranks_of_engines)
def test_ranks_merge_into_the_histogram_of_all_their_observations(ranks: list[Rank]) -> None:
    everything = [value for seen, _ in ranks for value in seen]
    shared = sorted(set.intersection(*({*bounds, inf} for _, bounds in ranks)))
    snapshot = merged(ranks)
    assert snapshot is not None
    assert snapshot.bounds == tuple(shared)
    assert snapshot.counts == tuple(sum(o <= bound for o in everything) for bound in shared)
    assert snapshot.sum == pytest.approx(sum(everything))


def test_one_bound_spelled_two_ways_is_one_bound() -> None:
    first, second = buckets(0, [0.5], [1.0]), buckets(1, [0.5], [1.0])
    assert {bucket.labels["le"] for bucket in first + second} == {"1.0", "1", "+Inf"}
    assert merged_histogram(first + second, [SeriesValue({}, 1.0)]) == HistogramSnapshot(
        (1.0, inf), (2.0, 2.0), 1.0
    )


def test_bounds_are_ordered_as_numbers() -> None:
    snapshot = merged([([0.5, 3.0], [10.0, 2.5, 0.1])])
    assert snapshot is not None
    assert snapshot.bounds == (0.1, 2.5, 10.0, inf)


def test_a_bucket_one_behind_the_bucket_below_it_is_lifted() -> None:
    torn = [
        SeriesValue({"le": "1"}, 5.0),
        SeriesValue({"le": "2"}, 4.0),
        SeriesValue({"le": "+Inf"}, 6.0),
    ]
    snapshot = merged_histogram(torn, [SeriesValue({}, 1.0)])
    assert snapshot is not None
    assert snapshot.counts == (5.0, 5.0, 6.0)


@pytest.mark.parametrize(
    ("incomplete", "sums"),
    [
        pytest.param([{"le": "1"}], [1.0], id="no-last-bucket"),
        pytest.param([{"le": "1"}, {"le": "+Inf"}], [], id="no-sum"),
        pytest.param([{"le": "one"}, {"le": "+Inf"}], [1.0], id="bound-is-no-number"),
        pytest.param([{"le": "NaN"}, {"le": "+Inf"}], [1.0], id="bound-is-nan"),
        pytest.param([{"ge": "1"}, {"le": "+Inf"}], [1.0], id="no-bound"),
        pytest.param(
            [{"le": "+Inf", "engine": "0"}, {"le": "1", "engine": "1"}], [1.0], id="one-rank-cut"
        ),
    ],
)
def test_an_incomplete_histogram_is_none(
    incomplete: list[dict[str, str]], sums: list[float]
) -> None:
    broken = [SeriesValue(labels, 1.0) for labels in incomplete]
    assert merged_histogram(broken, [SeriesValue({}, value) for value in sums]) is None
