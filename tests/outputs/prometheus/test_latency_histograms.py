"""Latency histograms: batches, exemplars, vantages, and limits of objectives as bucket edges."""

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.catalog import metrics as m
from agent.catalog.metric import Metric
from agent.outputs.prometheus.latency_histograms import (
    LATENCIES,
    BucketHistogram,
    bound_text,
    bounds_for,
)
from agent.outputs.prometheus.meter import Meter
from agent.records.request import RequestRecord, Vantage
from tests.outputs.prometheus.filled import JOINED, count
from tests.records.making import NOON, objective, record

BOUNDS = (0.1, 0.5, 1.0)

batches = st.lists(
    st.lists(st.sampled_from([0.0, 0.05, 0.1, 0.100001, 0.5, 0.7, 1.0, 1.5, 1e9]), max_size=20),
    max_size=5,
)


def trace_id(number: int) -> str:
    return f"{number:032x}"


@given(batches)
def test_each_bucket_counts_values_up_to_its_bound_and_has_an_exemplar_of_its_own(
    observed: list[list[float]],
) -> None:
    histogram = BucketHistogram(BOUNDS)
    for values in observed:
        histogram.observe(values, [(trace_id(0), 1.0)] * len(values))
    everything = [value for values in observed for value in values]
    counted = {text: count for text, count, _ in histogram.buckets()}
    assert counted == {
        bound_text(bound): sum(value <= bound for value in everything) for bound in (*BOUNDS, inf)
    }
    assert histogram.sum == pytest.approx(sum(everything))
    low = -inf
    for (_, _, exemplar), high in zip(histogram.buckets(), (*BOUNDS, inf), strict=True):
        assert exemplar is None or low < exemplar.value <= high
        low = high


def shown(histogram: BucketHistogram) -> dict[str, tuple[str, float, float] | None]:
    """The trace, value and time of each bucket's exemplar."""
    return {
        text: exemplar
        and (exemplar.labels["trace_id"], exemplar.value, float(exemplar.timestamp or 0))
        for text, _, exemplar in histogram.buckets()
    }


def test_the_newest_trace_of_each_bucket_is_its_exemplar() -> None:
    histogram = BucketHistogram(BOUNDS)
    histogram.observe(
        [0.05, 0.3, 0.06], [(trace_id(1), 100.0), (trace_id(2), 100.5), (trace_id(3), 101.0)]
    )
    histogram.observe([0.4, 5.0], [(trace_id(4), 200.0), (trace_id(5), 201.0)])
    assert shown(histogram) == {
        "0.1": (trace_id(3), 0.06, 101.0),
        "0.5": (trace_id(4), 0.4, 200.0),
        "1.0": None,
        "+Inf": (trace_id(5), 5.0, 201.0),
    }
    # An older one replaces none.
    histogram.observe([0.07, 0.8], [(trace_id(6), 99.0), (trace_id(7), 99.5)])
    assert shown(histogram)["0.1"] == (trace_id(3), 0.06, 101.0)
    assert shown(histogram)["1.0"] == (trace_id(7), 0.8, 99.5)


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
            [(trace_id(0), begin + later) for _, later in in_order],
        )
        for text, exemplar in shown(histogram).items():
            if exemplar is None:
                continue
            # As its parser cuts milliseconds off (model/textparse/openmetricsparse.go), and its
            # storage compares (tsdb/exemplar.go).
            stored = int(exemplar[2] * 1000), exemplar[1]
            assert stored >= held.get(text, stored)
            held[text] = stored


AT_ENGINE = ("chat-0", "llama", "engine")
AT_PROXY = ("chat-0", "llama", "proxy")


def joined(number: int, **given: Any) -> RequestRecord:
    """A request that proxy and engine saw."""
    trace = {"trace_id": trace_id(number), "span_id": f"{number:016x}"}
    return JOINED._replace(**(trace | given))


@pytest.mark.parametrize("histogram", LATENCIES, ids=lambda metric: metric.name)
def test_a_histogram_counts_known_values_and_omits_unknown_ones(
    histogram: Metric,
) -> None:
    latency = LATENCIES[histogram]
    latencies = dict.fromkeys(("ttft_s", "tpot_s", "e2e_s", "queue_s", "prefill_s", "decode_s"))
    unknown = latencies | dict.fromkeys(("max_gap_s", "proxied", "engine_view"))
    meter = Meter((), [])
    count(meter, joined(1), joined(2, **unknown), joined(3))
    labels = AT_PROXY[: len(histogram.labels)]
    counted = meter.snapshot().histograms[histogram, labels]
    value_s = latency.value(joined(1))
    assert value_s is not None
    assert counted.buckets[-1][1] == 2
    assert counted.sum == pytest.approx(2 * value_s)


def test_a_latency_is_counted_at_its_vantage() -> None:
    meter = Meter((), [])
    count(meter, record(1), record(2, vantage=Vantage.PROXY), joined(3))
    histograms = meter.snapshot().histograms
    counted = {
        labels: histograms[m.TTFT, labels].buckets[-1][1] for labels in (AT_ENGINE, AT_PROXY)
    }
    assert counted == {AT_ENGINE: 1, AT_PROXY: 2}


def test_a_request_that_waited_for_its_other_view_gives_no_exemplar_after_newer_ones() -> None:
    meter = Meter((), [])
    count(meter, joined(2, received_at=NOON + 8))
    count(
        meter,
        record(3, vantage=Vantage.PROXY, received_at=NOON + 9),
        record(1, vantage=Vantage.PROXY, received_at=NOON),
    )
    count(meter, record(4, vantage=Vantage.PROXY, received_at=NOON + 5))
    for labels in (AT_PROXY, AT_PROXY[:2]):
        measure = m.TTFT if labels == AT_PROXY else m.QUEUE
        buckets = meter.snapshot().histograms[measure, labels].buckets
        (exemplar,) = [exemplar for _, _, exemplar in buckets if exemplar]
        assert (exemplar.labels["trace_id"], exemplar.timestamp) == (
            record(3).trace_id,
            NOON + 9,
        )
        assert buckets[-1][1] == 4


def test_each_gap_between_chunks_is_counted() -> None:
    meter = Meter((), [])
    count(meter, joined(1), joined(2), record(3))
    gaps = meter.snapshot().histograms[m.CHUNK_GAP, AT_PROXY[:2]]
    assert gaps.buckets[-1][1] == 8
    assert dict((text, n) for text, n, _ in gaps.buckets)["0.015"] == 6
    assert gaps.sum == pytest.approx(2 * (3 * 0.01 + 0.2), rel=0.006)


limits = st.floats(1e-4, 100.0).map(lambda limit_ms: limit_ms / 1000) | st.sampled_from([0.2, 0.1])


@given(ttft_s=limits, tpot_s=limits, e2e_s=limits)
def test_the_limit_of_every_objective_is_a_bucket_edge(
    ttft_s: float, tpot_s: float, e2e_s: float
) -> None:
    objectives = (objective("a", ttft_s=ttft_s, tpot_s=tpot_s), objective("b", e2e_s=e2e_s))
    for metric, limit_s in ((m.TTFT, ttft_s), (m.TPOT, tpot_s), (m.DURATION, e2e_s)):
        default = LATENCIES[metric].bounds_s
        bounds = bounds_for(metric, objectives)
        assert limit_s in bounds
        assert set(default) <= set(bounds)
        assert list(bounds) == sorted(set(bounds))


@given(st.lists(st.floats(0, 1), max_size=30), limits)
def test_the_bucket_of_a_limit_counts_exactly_the_requests_that_met_it(
    latencies_s: list[float], limit_s: float
) -> None:
    meter = Meter((objective("only", ttft_s=limit_s),), [])
    count(meter, *[record(number, ttft_s=value) for number, value in enumerate(latencies_s)])
    snapshot = meter.snapshot()
    counted = snapshot.histograms.get((m.TTFT, AT_ENGINE))
    buckets = counted.buckets if counted else []
    within = {float(text): requests for text, requests, _ in buckets}.get(limit_s, 0)
    assert within == snapshot.counters[m.SLO_REQUESTS].get(("only", "chat-0", "llama", "met"), 0)
