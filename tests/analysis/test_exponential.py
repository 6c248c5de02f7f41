"""Bins as exponential histograms, against OpenTelemetry's messages and definitions."""

from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry.proto.metrics.v1.metrics_pb2 import ExponentialHistogramDataPoint
from opentelemetry.sdk.metrics._internal.exponential_histogram.mapping.logarithm_mapping import (
    LogarithmMapping,
)

from agent.analysis.quantiles import (
    BINS_PER_DOUBLING,
    HIGHEST_BIN,
    LARGEST_S,
    LOWEST_BIN,
    SCALE,
    SMALLEST_S,
    ZERO_THRESHOLD_S,
    ExponentialHistogram,
    bin_of,
    bins_of,
    exponential_from,
)

BINS = st.dictionaries(st.integers(LOWEST_BIN, HIGHEST_BIN), st.integers(1, 2**63), max_size=30)


def point_of(histogram: ExponentialHistogram) -> ExponentialHistogramDataPoint:
    """The OTLP message of a histogram, serialised and parsed again."""
    point = ExponentialHistogramDataPoint(
        count=min(histogram.count, 2**64 - 1),
        scale=histogram.scale,
        zero_count=histogram.zero_count,
        zero_threshold=histogram.zero_threshold,
        positive=ExponentialHistogramDataPoint.Buckets(
            offset=histogram.offset, bucket_counts=histogram.bucket_counts
        ),
    )
    return ExponentialHistogramDataPoint.FromString(point.SerializeToString())


def bins_in(point: ExponentialHistogramDataPoint) -> dict[int, int]:
    """The bins of a message."""
    buckets = enumerate(point.positive.bucket_counts, point.positive.offset + 1)
    lowest = {LOWEST_BIN: point.zero_count} if point.zero_count else {}
    return lowest | {index: count for index, count in buckets if count}


@given(BINS)
@example({})
@example({LOWEST_BIN: 3})
def test_bins_survive_the_round_trip_through_the_message(bins: dict[int, int]) -> None:
    assert bins_in(point_of(exponential_from(bins))) == bins


@given(st.lists(st.floats(SMALLEST_S * 1.1, LARGEST_S), min_size=1))
def test_each_value_is_in_the_same_bucket_as_in_opentelemetry(
    values_s: list[float],
) -> None:
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


def test_buckets_have_the_boundaries_of_the_specification() -> None:
    """Bucket i holds (base**i, base**(i+1)], base = 2**(2**-scale)."""
    base = 2.0 ** (2.0**-SCALE)
    for bin_index in range(LOWEST_BIN + 1, HIGHEST_BIN, 37):
        (low, high) = (base ** (bin_index - 1), base**bin_index)
        inside = (low * (1 + 1e-9), high * (1 - 1e-9))
        for value_s in inside:
            assert exponential_from(bins_of([value_s])).offset == bin_index - 1


def test_the_lowest_bin_is_the_zero_bucket() -> None:
    histogram = exponential_from(bins_of([0.0, SMALLEST_S, 1.0]))
    assert (histogram.zero_count, histogram.count, sum(histogram.bucket_counts)) == (2, 3, 1)
    assert SMALLEST_S <= ZERO_THRESHOLD_S < SMALLEST_S * 1.02


def test_empty_bins_between_others_are_kept() -> None:
    histogram = exponential_from({100: 1, 102: 5})
    assert (histogram.offset, tuple(histogram.bucket_counts)) == (99, (1, 0, 5))
