"""Quantiles from bins, and bins as exponential histograms."""

from collections import Counter
from collections.abc import Sequence
from math import ceil, inf, nextafter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics._internal.exponential_histogram.mapping.logarithm_mapping import (
    LogarithmMapping,
)

from agent.analysis.quantiles import (
    BINS_PER_DOUBLING,
    LARGEST_S,
    RELATIVE_ERROR,
    SCALE,
    SMALLEST_S,
    ZERO_THRESHOLD_S,
    bin_of,
    bins_of,
    exponential_from,
    quantile,
    value_of,
)

QS = (0.01, 0.25, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)

# Rounding of floating point at the edges of bins, where the error equals its bound.
ROUNDING = 1 + 1e-12

# Shorter times count as zero.
SHORTEST_S = ZERO_THRESHOLD_S * ROUNDING

seconds = st.floats(SHORTEST_S, LARGEST_S)


def exact(values_s: Sequence[float], q: float) -> float:
    """The value at rank ceil(q*n), by sorting."""
    return sorted(values_s)[max(1, ceil(round(q * len(values_s), 9))) - 1]


def assert_close(found_s: float | None, expected_s: float) -> None:
    assert found_s is not None
    assert abs(found_s - expected_s) <= RELATIVE_ERROR * expected_s * ROUNDING


@given(seconds | st.integers(-19, 16).map(lambda power: nextafter(2.0**power, 0)))
@example(1.0)
def test_the_value_of_a_bin_is_within_the_relative_error_of_each_of_its_values(
    value_s: float,
) -> None:
    assert_close(value_of(bin_of(value_s)), value_s)


@given(st.floats(min_value=0), st.floats(min_value=0))
def test_a_larger_value_is_never_in_a_lower_bin(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert bin_of(low) <= bin_of(high)


@given(st.lists(st.floats(min_value=0), max_size=50))
def test_counting_many_values_equals_counting_one_by_one(values_s: list[float]) -> None:
    assert bins_of(values_s) == Counter(map(bin_of, values_s))


@given(st.lists(seconds, min_size=1, max_size=200), st.sampled_from(QS))
def test_a_quantile_is_within_the_relative_error_of_the_exact_one(
    values_s: list[float], q: float
) -> None:
    assert_close(quantile(bins_of(values_s), q), exact(values_s, q))


@pytest.mark.parametrize(
    ("count", "q", "rank"),
    [
        *((100, 0.99, 99), (101, 0.99, 100), (100, 0.95, 95), (20, 0.95, 19), (21, 0.95, 20)),
        *((2, 0.5, 1), (3, 0.5, 2), (1, 0.99, 1), (1000, 0.999, 999), (7, 1.0, 7), (7, 0.0, 1)),
    ],
)
def test_the_rank_is_the_smallest_that_covers_the_share(count: int, q: float, rank: int) -> None:
    # One value per bin, so that a rank off by one gives another value.
    bins = dict.fromkeys(range(count), 1)
    assert quantile(bins, q) == value_of(rank - 1)


def test_no_values_have_no_quantile() -> None:
    assert quantile({}, 0.5) is None
    assert quantile({3: 0}, 0.5) is None
    assert bins_of([]) == {}


@pytest.mark.parametrize("value_s", [0.0, 5e-324, SMALLEST_S / 2, SMALLEST_S, ZERO_THRESHOLD_S])
def test_zero_and_a_value_below_the_range_are_zero(value_s: float) -> None:
    assert bin_of(value_s) == bin_of(SMALLEST_S)
    assert quantile(bins_of([value_s, 1.0]), 0.5) == 0.0


@pytest.mark.parametrize("value_s", [LARGEST_S, nextafter(LARGEST_S, inf), 1e9, 1e308, inf])
def test_a_value_above_the_range_counts_as_the_largest(value_s: float) -> None:
    assert bin_of(value_s) == bin_of(LARGEST_S)
    assert quantile(bins_of([value_s]), 0.5) == pytest.approx(LARGEST_S, rel=0.01)


@given(st.lists(st.floats(SMALLEST_S * 1.1, LARGEST_S), min_size=1))
def test_each_value_is_in_the_same_bucket_as_in_opentelemetry(values_s: list[float]) -> None:
    reference = LogarithmMapping(SCALE)
    histogram = exponential_from(bins_of(values_s))
    counts = {
        index: count
        for index, count in enumerate(histogram.bucket_counts, histogram.offset)
        if count
    }
    expected: dict[int, int] = {}
    for value_s in values_s:
        index = bin_of(value_s) - 1
        expected[index] = expected.get(index, 0) + 1
        # Exactly on an edge, rounding of either logarithm may choose either bucket.
        assert abs(reference.map_to_index(value_s) - index) <= (_at_edge(value_s))
    assert counts == expected


def _at_edge(value_s: float) -> bool:
    """Whether rounding decides the bucket because the value is on an edge."""
    index = bin_of(value_s)
    edges = [2 ** ((index + n) / BINS_PER_DOUBLING) for n in (-1, 0)]
    return any(abs(value_s / edge - 1) < 1e-12 for edge in edges)


def test_a_histogram_has_a_zero_bucket_and_keeps_empty_bins_between_others() -> None:
    histogram = exponential_from(bins_of([0.0, SMALLEST_S, 1.0]))
    assert (histogram.zero_count, histogram.count, sum(histogram.bucket_counts)) == (2, 3, 1)
    assert SMALLEST_S <= ZERO_THRESHOLD_S < SMALLEST_S * 1.02
    apart = exponential_from({100: 1, 102: 5})
    assert (apart.offset, tuple(apart.bucket_counts)) == (99, (1, 0, 5))
    assert exponential_from({}).count == 0
