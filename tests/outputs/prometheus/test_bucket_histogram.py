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
        histogram.observe(values, [(trace(0), 1.0)] * len(values))
    everything = [value for values in observed for value in values]
    counted = {text: count for text, count, _ in histogram.buckets()}
    assert counted == {
        bound_text(bound): sum(value <= bound for value in everything) for bound in (*BOUNDS, inf)
    }
    assert histogram.sum == pytest.approx(sum(everything))


def shown(histogram: BucketHistogram) -> dict[str, tuple[str, float, float] | None]:
    """The trace, value and time of each bucket's exemplar."""
    return {
        text: exemplar
        and (exemplar.labels["trace_id"], exemplar.value, float(exemplar.timestamp or 0))
        for text, _, exemplar in histogram.buckets()
    }


def test_the_newest_trace_of_each_bucket_is_its_exemplar() -> None:
    histogram = BucketHistogram(BOUNDS)
    histogram.observe([0.05, 0.3, 0.06], [(trace(1), 100.0), (trace(2), 100.5), (trace(3), 101.0)])
    histogram.observe([0.4, 5.0], [(trace(4), 200.0), (trace(5), 201.0)])
    assert shown(histogram) == {
        "0.1": (trace(3), 0.06, 101.0),
        "0.5": (trace(4), 0.4, 200.0),
        "1.0": None,
        "+Inf": (trace(5), 5.0, 201.0),
    }


def test_an_exemplar_is_never_replaced_by_an_older_one() -> None:
    histogram = BucketHistogram(BOUNDS)
    histogram.observe([0.05], [(trace(1), 100.0)])
    histogram.observe([0.06, 0.3], [(trace(2), 99.0), (trace(3), 99.5)])
    assert shown(histogram)["0.1"] == (trace(1), 0.05, 100.0)
    assert shown(histogram)["0.5"] == (trace(3), 0.3, 99.5)
    assert [count for _, count, _ in histogram.buckets()] == [2, 3, 3, 3]


scrapes = st.lists(
    st.lists(
        st.tuples(st.sampled_from([0.05, 0.06, 0.3]), st.integers(0, 20).map(lambda n: n / 4000)),
        max_size=4,
    ),
    max_size=8,
)


@given(scrapes, st.floats(1.6e9, 2e9))
def test_prometheus_takes_the_exemplar_of_every_scrape(
    observed: list[list[tuple[float, float]]], begin: float
) -> None:
    histogram = BucketHistogram(BOUNDS)
    held: dict[str, tuple[int, float]] = {}
    for batch in observed:
        in_order = sorted(batch, key=lambda item: item[1])
        histogram.observe(
            [value for value, _ in in_order],
            [(trace(0), begin + later) for _, later in in_order],
        )
        for text, exemplar in shown(histogram).items():
            if exemplar is None:
                continue
            # As its parser cuts milliseconds off (model/textparse/openmetricsparse.go), and its
            # storage compares (tsdb/exemplar.go).
            stored = int(exemplar[2] * 1000), exemplar[1]
            assert stored >= held.get(text, stored)
            held[text] = stored


@given(batches)
def test_an_exemplar_is_in_the_range_of_its_bucket(observed: list[list[float]]) -> None:
    histogram = BucketHistogram(BOUNDS)
    for values in observed:
        histogram.observe(values, [(trace(0), 1.0)] * len(values))
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
