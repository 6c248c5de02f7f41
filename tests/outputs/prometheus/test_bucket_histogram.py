"""Histograms that observe batches, compared with single counts."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.outputs.prometheus.bucket_histogram import BucketHistogram, bound_text

BOUNDS = (0.1, 0.5, 1.0)

batches = st.lists(
    st.lists(st.sampled_from([0.0, 0.05, 0.1, 0.100001, 0.5, 0.7, 1.0, 1.5, 1e9]), max_size=20),
    max_size=5,
)


def trace(number: int) -> str:
    return f"{number:032x}"


@given(batches)
def test_each_bucket_counts_values_up_to_its_bound(observed: list[list[float]]) -> None:
    histogram = BucketHistogram(BOUNDS)
    for values in observed:
        histogram.observe(values, [trace(0)] * len(values), 1.0)
    everything = [value for values in observed for value in values]
    counted = {text: count for text, count, _ in histogram.buckets()}
    assert counted == {
        bound_text(bound): sum(value <= bound for value in everything) for bound in (*BOUNDS, inf)
    }
    assert histogram.sum == pytest.approx(sum(everything))


def test_the_newest_trace_of_each_bucket_is_its_exemplar() -> None:
    histogram = BucketHistogram(BOUNDS)
    histogram.observe([0.05, 0.3, 0.06], [trace(1), trace(2), trace(3)], 100.0)
    histogram.observe([0.4, 5.0], [trace(4), trace(5)], 200.0)
    shown = {
        text: exemplar and (exemplar.labels["trace_id"], exemplar.value, exemplar.timestamp)
        for text, _, exemplar in histogram.buckets()
    }
    assert shown == {
        "0.1": (trace(3), 0.06, 100.0),
        "0.5": (trace(4), 0.4, 200.0),
        "1.0": None,
        "+Inf": (trace(5), 5.0, 200.0),
    }


@given(batches)
def test_an_exemplar_is_in_the_range_of_its_bucket(observed: list[list[float]]) -> None:
    histogram = BucketHistogram(BOUNDS)
    for values in observed:
        histogram.observe(values, [trace(0)] * len(values), 1.0)
    low = -inf
    for (_, _, exemplar), high in zip(histogram.buckets(), (*BOUNDS, inf), strict=True):
        assert exemplar is None or low < exemplar.value <= high
        low = high


@pytest.mark.parametrize(
    ("bound", "text"), [(1, "1.0"), (0.1, "0.1"), (0.0025, "0.0025"), (160.0, "160.0")]
)
def test_a_bound_is_written_as_prometheus_writes_floats(bound: float, text: str) -> None:
    assert bound_text(bound) == text
    assert bound_text(inf) == "+Inf"
