"""The figures of a window: an unknown figure is None, never 0."""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import asdict
from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.analysis.quantiles import RELATIVE_ERROR, bin_of
from agent.analysis.summary import Failures, Summary, TrafficLimit, check_traffic_limits, summarise
from agent.analysis.tally import (
    ALL_OBJECTIVES,
    MEASURES,
    CausePlace,
    CauseSum,
    Tally,
    VerdictCounts,
    figures_by_cause,
    input_length_of,
    tally_of,
)
from agent.records.objective import JudgedRequest, Match
from agent.records.request import RequestRecord, Status, Vantage
from tests.records.making import judged, objective, record

LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms")
UNKNOWN = {"p50": None, "p95": None, "p99": None}

SLOW: dict[str, Any] = {"ttft_s": 9.0}


def summary(*records: RequestRecord, window_s: float = 10.0, of: str = "") -> Summary:
    return summarise(tally_of(judged(records)), window_s, of)


def test_an_empty_window_has_counts_and_rates_of_zero_and_unknown_latencies() -> None:
    figures = asdict(summarise(Tally(), 300.0))
    zero = ("requests", "met", "missed", "undetermined", "goodput_rps", "throughput_rps")
    assert all(figures[name] == 0 for name in zero)
    assert figures["attainment"] is None
    assert figures["error_ratio"] is None
    assert all(figures[name] == UNKNOWN for name in LATENCIES)
    # No request has no tokens: these rates are known.
    rates = ("goodput_tokens_per_s", "input_tokens_per_s", "output_tokens_per_s")
    assert all(figures[name] == 0 for name in rates)


def test_rates_are_per_second_of_the_window() -> None:
    result = summary(record(1), record(2), record(3, **SLOW), record(4, status=Status.ERROR))
    assert result.goodput_rps == 0.2
    assert result.throughput_rps == 0.3
    assert result.goodput_tokens_per_s == 4.2
    assert result.output_tokens_per_s == 8.4
    assert result.input_tokens_per_s == 40.0
    assert result.violations_per_min == 12.0
    assert summarise(Tally(), 0.0).violations_per_min is None


@pytest.mark.parametrize(
    ("met", "missed", "undetermined", "attainment"),
    [(1, 2, 1, 1 / 3), (0, 0, 2, None), (0, 1, 0, 0.0)],
)
def test_attainment_leaves_out_undetermined_requests(
    met: int, missed: int, undetermined: int, attainment: float | None
) -> None:
    ttfts_s = [*[0.1] * met, *[9.0] * missed, *[None] * undetermined]
    result = summary(*[record(n, ttft_s=ttft_s) for n, ttft_s in enumerate(ttfts_s)])
    assert (result.met, result.missed, result.undetermined) == (met, missed, undetermined)
    assert result.attainment == attainment
    assert result.goodput_rps == met / 10


def test_one_objective_is_summarised_apart_from_all_together() -> None:
    objectives = (
        objective("fast", ttft_s=0.05),
        objective("fair", ttft_s=0.2),
        objective("other", match=Match(model="qwen")),
    )
    tally = tally_of(judged([record(1, ttft_s=0.01), record(2, ttft_s=0.1)], objectives))
    attained = {of: summarise(tally, 10.0, of).attainment for of in ("", "fast", "fair", "other")}
    # That of both together would be nobody's figure.
    assert attained == {"": None, "fast": 0.5, "fair": 1.0, "other": None}
    assert [
        (each.objective, each.met, each.missed, each.undetermined, each.attainment)
        for each in summarise(tally, 10.0).by_objective
    ] == [("fair", 2, 0, 0, 1.0), ("fast", 1, 1, 0, 0.5)]
    assert summarise(tally, 10.0, "fair").goodput_rps == 0.2


@pytest.mark.parametrize(
    ("records", "good", "output"),
    [
        ([record(1, output_tokens=None)], None, None),
        # Only the missed one has a count.
        ([record(1, output_tokens=None), record(2, **SLOW)], None, 2.1),
        ([record(1, output_tokens=None, **SLOW), record(2, **SLOW)], 0.0, 2.1),
        ([record(output_tokens=0)], 0.0, 0.0),
    ],
)
def test_good_tokens_are_zero_without_a_good_request_and_else_unknown_without_counts(
    records: list[RequestRecord], good: float | None, output: float | None
) -> None:
    result = summary(*records)
    assert (result.goodput_tokens_per_s, result.output_tokens_per_s) == (good, output)
    assert summary(record(input_tokens=None)).input_tokens_per_s is None


_ENDS = [Status.OK] * 6 + [Status.ERROR, Status.TIMEOUT, Status.THROTTLED, Status.CANCELLED]


@pytest.mark.parametrize(
    ("requests", "ratio"),
    [
        (product([Vantage.PROXY], _ENDS), 3 / 9),
        (product([Vantage.JOINED], _ENDS), 3 / 9),
        (product([Vantage.PROXY], [Status.CANCELLED]), None),
        (product([Vantage.ENGINE], _ENDS), None),
        ([(Vantage.PROXY, Status.OK), (Vantage.ENGINE, Status.OK)], None),
    ],
    ids=["proxy", "joined", "all cancelled", "engine", "some at the engine alone"],
)
def test_the_error_ratio_is_of_requests_at_the_proxy_that_were_not_cancelled(
    requests: Iterable[tuple[Vantage, Status]], ratio: float | None
) -> None:
    ended = [record(n, vantage=v, status=s) for n, (v, s) in enumerate(list(requests))]
    assert summary(*ended).error_ratio == ratio


def test_a_clients_mistakes_are_no_errors_and_hide_no_latency() -> None:
    seen: Any = {"vantage": Vantage.PROXY}
    typos = [record(n, status=Status.INVALID, e2e_s=0.002, **seen) for n in range(2, 100)]
    result = summary(record(1, e2e_s=5.0, **seen), record(100, status=Status.ERROR, **seen), *typos)
    assert result.error_ratio == 1 / 2
    assert result.attainment == 1 / 2
    assert result.e2e_ms["p50"] == pytest.approx(500, rel=RELATIVE_ERROR)


def test_failures_are_known_by_vantage() -> None:
    at_proxy = [Status.OK, Status.OK, Status.TIMEOUT, Status.CANCELLED]
    result = summary(
        *[record(n, status=s, vantage=Vantage.JOINED) for n, s in enumerate(at_proxy)],
        *[record(9, status=Status.ERROR), record(10)],
    )
    assert result.failures == {
        "proxy": Failures(requests=4, failed=1, error_ratio=1 / 3),
        "engine": Failures(requests=2, failed=1, error_ratio=None),
    }


def test_failures_are_unknown_where_an_earlier_version_counted() -> None:
    tally = tally_of(judged([record(1, vantage=Vantage.PROXY), record(2, status=Status.ERROR)]))
    tally.proxy_counted = tally.proxy_ended = 0
    failures = summarise(tally, 10.0).failures
    assert [each.failed for each in failures.values()] == [None, None]
    assert failures["proxy"].error_ratio is None


def test_percentiles_are_milliseconds_of_requests_with_a_known_latency() -> None:
    result = summary(*[record(n, ttft_s=n / 1000, e2e_s=n / 100) for n in range(1, 101)])
    for percent in (50, 95, 99):
        assert result.ttft_ms[f"p{percent}"] == pytest.approx(percent, rel=RELATIVE_ERROR)
        assert result.e2e_ms[f"p{percent}"] == pytest.approx(percent * 10, rel=RELATIVE_ERROR)

    unknown = dict.fromkeys(latency.replace("_ms", "_s") for latency in LATENCIES)
    assert {name: getattr(summary(record(**unknown)), name) for name in LATENCIES} == (
        dict.fromkeys(LATENCIES, UNKNOWN)
    )


def test_a_traffic_limit_holds_at_its_exact_value_and_is_undetermined_without_a_figure() -> None:
    proxied: dict[str, Any] = {"vantage": Vantage.PROXY, "output_tokens": 50}
    result = summary(record(1, **proxied), record(2, status=Status.ERROR, **proxied))
    assert check_traffic_limits(result, 0.5, 10.0) == (
        TrafficLimit("max_error_ratio", 0.5, 0.5, True),
        TrafficLimit("min_output_tokens_per_s", 10.0, 10.0, True),
    )
    assert [promise.holds for promise in check_traffic_limits(result, 0.49, 10.1)] == [False, False]
    assert check_traffic_limits(summary(record(1)), 0.001, None) == (
        TrafficLimit("max_error_ratio", 0.001, None, None),
    )


def test_stream_speeds_are_percentiles_of_the_speed_of_each_stream() -> None:
    """Load generators give 1 / TPOT of each request: of these 200 the slowest ones are at p1."""
    speeds = [number / 2 for number in range(1, 201)]
    records = [record(n, tpot_s=1 / speed) for n, speed in enumerate(speeds)]
    found = summary(*records).stream_tokens_per_s
    wanted = {"p50": 50.0, "p5": 5.0, "p1": 1.0}
    for name, speed in wanted.items():
        at = found[name]
        assert at is not None
        # A percentile of 200 values may be either of two neighbours.
        assert speed * (1 - RELATIVE_ERROR) <= at <= (speed + 0.5) * (1 + RELATIVE_ERROR), name
    for tpot_s in (None, 0.0):
        no_pace = summary(record(1, tpot_s=tpot_s)).stream_tokens_per_s
        assert no_pace == dict.fromkeys(wanted)


# Tallies of requests, sums that merge, and groups of lengths

OBJECTIVES = (
    objective("fast", ttft_s=0.05),
    objective("fair", ttft_s=0.5, match=Match(model="llama*")),
)

seconds = st.none() | st.floats(0, 1e6)
tokens = st.none() | st.integers(0, 1000)
records: st.SearchStrategy[RequestRecord] = st.builds(
    record,
    st.integers(0, 99),
    status=st.sampled_from(Status),
    vantage=st.sampled_from(Vantage),
    model=st.sampled_from(["llama", "qwen", None]),
    ttft_s=seconds,
    tpot_s=seconds,
    e2e_s=seconds,
    queue_s=seconds,
    input_tokens=tokens,
    output_tokens=tokens,
)
judged_requests = st.lists(records, max_size=30).map(lambda all_of: judged(all_of, OBJECTIVES))


def total(tallies: Iterable[Tally]) -> Tally:
    """The sum of these tallies."""
    summed = Tally()
    for tally in tallies:
        summed.add(tally)
    return summed


@settings(max_examples=20)
@given(st.lists(judged_requests, max_size=3))
def test_groups_add_up_in_any_order_and_none_is_changed(groups: list[list[JudgedRequest]]) -> None:
    whole = tally_of([item for group in groups for item in group])
    tallies = [tally_of(group) for group in groups]
    before = deepcopy(tallies)
    for order in permutations(tallies):
        assert total(order) == whole
    assert tallies == before


def test_counts_of_four_requests() -> None:
    requests = judged(
        [
            record(1, ttft_s=0.01, input_tokens=100, output_tokens=7),
            record(2, ttft_s=0.1, input_tokens=None, output_tokens=None, vantage=Vantage.PROXY),
            record(3, status=Status.ERROR, model="qwen", output_tokens=0, tpot_s=None),
            record(4, ttft_s=None, tpot_s=None, e2e_s=None, queue_s=None, vantage=Vantage.JOINED),
        ],
        OBJECTIVES,
    )
    tally = tally_of(requests)
    assert tally.requests == 4
    assert tally.statuses == {"ok": 3, "error": 1}
    assert tally.seen_at_proxy == 2
    assert (tally.input_tokens, tally.input_tokens_known) == (300, 3)
    assert (tally.output_tokens, tally.output_tokens_known) == (28, 3)
    assert tally.verdicts == {
        ("fast", "met"): VerdictCounts(1, 7),
        ("fast", "missed"): VerdictCounts(2, 0),
        ("fast", "undetermined"): VerdictCounts(1, 21),
        ("fair", "met"): VerdictCounts(2, 7),
        ("fair", "undetermined"): VerdictCounts(1, 21),
        (ALL_OBJECTIVES, "met"): VerdictCounts(1, 7),
        (ALL_OBJECTIVES, "missed"): VerdictCounts(2, 0),
        (ALL_OBJECTIVES, "undetermined"): VerdictCounts(1, 21),
    }
    assert tally.bins["ttft_s"] == {bin_of(0.01): 1, bin_of(0.1): 2}
    assert tally.bins["tpot_s"] == {bin_of(0.02): 2}


@pytest.mark.parametrize("measure", MEASURES)
def test_an_unknown_value_is_in_no_bin(measure: str) -> None:
    assert measure not in tally_of(judged([record(**{measure: None})])).bins
    assert tally_of(judged([record(**{measure: 0.0})])).bins[measure] == {bin_of(0.0): 1}


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        *((None, None), (0, "0-1k"), (1023, "0-1k"), (1024, "1k-4k"), (4095, "1k-4k")),
        *((4096, "4k-16k"), (16383, "4k-16k"), (16384, "16k-64k"), (65535, "16k-64k")),
        *((65536, "64k+"), (10**9, "64k+")),
    ],
)
def test_an_input_length_includes_its_lower_edge_and_excludes_its_upper(
    tokens: int | None, expected: str | None
) -> None:
    assert input_length_of(tokens) == expected


def test_causes_come_by_their_seconds_over_all_limits_then_by_their_requests() -> None:
    sums = {
        CausePlace("chat", "failure", "admission"): CauseSum(requests=1, top_requests=1),
        CausePlace("chat", "failure", "engine_failure"): CauseSum(requests=3, top_requests=3),
        CausePlace("chat", "ttft", "burst"): CauseSum(requests=1, top_requests=1, excess_s=4.0),
        CausePlace("chat", "ttft", "network"): CauseSum(requests=1, top_requests=1, excess_s=3.0),
        CausePlace("chat", "e2e", "network"): CauseSum(requests=1, excess_s=3.0),
    }
    found = figures_by_cause(sums)
    assert [each.cause for each in found] == ["network", "burst", "engine_failure", "admission"]
    assert [each.share for each in found] == [0.6, 0.4, None, None]
