"""Busy, idle and unknown time of an engine."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.analysis.efficiency.busy_time import TimeParts, time_parts
from agent.analysis.efficiency.engine_observation import IntervalState, minute_start_near
from agent.analysis.efficiency.request_activity import TimeRange, TimeRanges, covered_s
from agent.records.engine import EngineSample
from agent.records.request import RequestRecord, Status
from tests.analysis.cost.engine_days import engine_sample, observation, request
from tests.records.columns import active

TEN = TimeRange(0.0, 10.0)


def parts(
    samples: list[EngineSample], rows: list[RequestRecord] | None = None, window: TimeRange = TEN
) -> TimeParts:
    observed = observation(samples, window)
    return time_parts(observed, active(rows or []))


def state(before: dict[str, float], after: dict[str, float]) -> IntervalState:
    (interval,) = observation(
        [engine_sample(0.0, **before), engine_sample(10.0, **after)], TEN
    ).intervals
    return interval.state


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"running": 2, "steps": 5}, {"running": 1, "steps": 9}, IntervalState.AT_WORK),
        # A long prefill has no step with output.
        ({"running": 1, "steps": 5}, {"running": 1, "steps": 5}, IntervalState.AT_WORK),
        ({"running": 0, "steps": 5}, {"running": 0, "steps": 5}, IntervalState.IDLE),
        ({"running": 0, "steps": 5}, {"running": 0, "steps": 6}, IntervalState.AT_WORK),
        ({"running": 0, "steps": 5}, {"running": 3, "steps": 5}, IntervalState.AT_WORK),
        ({"running": 3, "steps": 5}, {"running": 0, "steps": 9}, IntervalState.AT_WORK),
        ({"output": 5}, {"output": 6}, IntervalState.AT_WORK),
        ({"output": 5}, {"output": 5}, IntervalState.IDLE),
        ({"running": 0}, {"running": 0}, IntervalState.IDLE),
        # A queue without a running request is not busy.
        ({"running": 0, "waiting": 3}, {"running": 0, "waiting": 3}, IntervalState.IDLE),
        ({"waiting": 0}, {"waiting": 0}, IntervalState.UNREAD),
    ],
)
def test_the_state_of_an_interval_follows_from_its_two_samples(
    before: dict[str, float], after: dict[str, float], expected: IntervalState
) -> None:
    assert state(before, after) is expected


def two(output: float, running: tuple[int, int] = (0, 0)) -> list[EngineSample]:
    """Samples at 0 and 10 s, between which the engine counts these output tokens."""
    return [
        engine_sample(0.0, running=running[0], output=0),
        engine_sample(10.0, running=running[1], output=output),
    ]


# Samples, rows, and the busy, idle and unknown seconds.
PARTS: dict[str, tuple[list[EngineSample], list[RequestRecord], tuple[float, float, float]]] = {
    "a long interval without samples is unknown": (
        [engine_sample(at, running=0, steps=5) for at in (-1.0, 20.0)], [], (0, 0, 10),
    ),
    "a restart is unknown": (
        [engine_sample(0.0, 100.0, running=1), engine_sample(10.0, 200.0, running=1)],
        [], (0, 0, 10),
    ),
    "time before the first and after the last sample is unknown": (
        [engine_sample(at, running=0, steps=5) for at in (2.0, 7.0)], [], (0, 5, 5),
    ),
    "a short request between two idle samples is busy for its duration": (
        two(21), [request(1, 4.0, prefill_s=0.2, decode_s=0.8)], (1, 9, 0),
    ),
    "time in the queue is not busy": (
        two(21), [request(1, 1.0, queue_s=5.0, prefill_s=1.0, decode_s=1.0)], (2, 8, 0),
    ),
    "tokens without a row lengthen the busy time in proportion": (
        two(63), [request(1, 4.0, prefill_s=0.2, decode_s=0.8)], (3, 7, 0),
    ),
    "tokens without any row make the whole interval busy": (two(1), [], (10, 0, 0)),
    "a request without a row at both samples ran all the time": (
        two(21, (2, 1)), [request(1, -1.0, prefill_s=1.0, decode_s=2.0)], (10, 0, 0),
    ),
    "time without samples is busy while rows show requests": (
        [], [request(1, 3.0, prefill_s=1.0, decode_s=3.0)], (4, 0, 6),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("samples", "rows", "expected"), PARTS.values(), ids=PARTS)
def test_the_parts_of_ten_seconds(
    samples: list[EngineSample], rows: list[RequestRecord], expected: tuple[float, float, float]
) -> None:
    assert parts(samples, rows) == pytest.approx(expected)


@pytest.mark.parametrize("running", [(1, 1), (2, 1), (1, 2)])
def test_two_samples_with_different_requests_may_have_idle_time_between(
    running: tuple[int, int],
) -> None:
    """Also if one of them shows more requests than rows."""
    samples = [
        engine_sample(10.0 * n, running=each, output=26.0 * n) for n, each in enumerate(running)
    ]
    rows = [
        request(1, -1.0, prefill_s=1.0, decode_s=2.0),
        request(2, 9.0, prefill_s=0.5, decode_s=2.5),
    ]
    assert parts(samples, rows).busy_s == pytest.approx(3)


def test_intervals_reach_to_the_samples_around_the_minute() -> None:
    samples = [engine_sample(at, running=0) for at in (-9.0, -3.0, 4.0, 11.0, 14.0)]
    intervals = observation(samples, TEN).intervals
    assert (intervals[0].time.from_at, intervals[-1].time.until) == (-3.0, 11.0)
    times = [57.0, 62.0, 67.0]
    assert [minute_start_near(at, times, max_gap_s=15) for at in (60.0, 90.0)] == [62.0, 90.0]


FULL = {"kv": 0.99, "waiting": 2.0}


@pytest.mark.parametrize(
    ("times", "counts", "full_s"),
    [
        ((0.0, 5.0, 10.0), {5.0: FULL}, 5.0),
        ((0.0, 5.0, 10.0), {5.0: FULL | {"waiting": 0.0}}, 0.0),
        ((0.0, 5.0, 10.0), {5.0: FULL | {"kv": 0.5}}, 0.0),
        # Preemptions mean that it was full.
        ((0.0, 4.0, 6.0, 10.0), {6.0: {"preemptions": 1.0}, 10.0: {"preemptions": 1.0}}, 2.0),
        # It could not be read for long.
        ((0.0, 40.0), {0.0: FULL, 40.0: FULL | {"preemptions": 9.0}}, 0.0),
    ],
)
def test_a_cache_is_full_when_requests_wait_for_it(
    times: Sequence[float], counts: Mapping[float, dict[str, float]], full_s: float
) -> None:
    samples = [
        engine_sample(at, **{"running": 1.0, "preemptions": 0.0, **counts.get(at, {})})
        for at in times
    ]
    assert observation(samples, TEN).cache_full_s == full_s


TWENTY = TimeRange(0.0, 20.0)
# In the first 10 s: 1,000 prompt tokens in 0.1 s, and 100 tokens, one every 10 ms.
ROW = request(1, 2.0, prefill_s=0.1, decode_s=1.0, input_tokens=1000, output_tokens=101)
ROW = ROW._replace(ended_at=3.1)
NOTHING = {"running": 0.0, "steps": 0.0, "input": 0.0, "output": 0.0, "drafts": 0.0}
OF_ROW = {"running": 0.0, "steps": 101.0, "input": 1000.0, "output": 101.0}


def busy_s(at_10: dict[str, float], at_20: dict[str, float], **both: Any) -> float:
    """Seconds that the engine was busy, with the row in the first half."""
    counts = [NOTHING | both, at_10 | both, at_20 | both]
    samples = [engine_sample(10.0 * n, **each) for n, each in enumerate(counts)]
    return time_parts(observation(samples, TWENTY), active([ROW])).busy_s


def more(**counts: float) -> dict[str, float]:
    """The counters after this more than the row's."""
    return {name: OF_ROW[name] + counts.get(name, 0.0) for name in OF_ROW}


# The counters after each half, counters of both, and busy seconds: the row's 1.1 and others.
BUSY: dict[str, tuple[dict[str, float], dict[str, float], dict[str, float], float]] = {
    "counts without a row take the time that rows took for as many": (
        OF_ROW, more(steps=50.0, input=2000.0, output=50.0), {}, 1.1 + 50 * 0.01 + 2 * 0.1,
    ),
    # Two streams, of which one has no row: in proportion to tokens it is 2.2 s.
    "tokens in the steps of a row take no time of their own": (
        more(output=100.0), more(output=100.0), {}, 1.1,
    ),
    "steps beyond those of rows take time": (
        more(steps=50.0, output=150.0), more(steps=50.0, output=150.0), {}, 1.1 + 50 * 0.01,
    ),
    "with drafts the steps of a row are unknown and tokens decide": (
        more(output=101.0) | {"drafts": 40.0}, more(output=101.0) | {"drafts": 40.0}, {}, 2.2,
    ),
    "a prompt that is not counted yet makes the interval busy": (
        OF_ROW, OF_ROW | {"running": 1.0}, {}, 11.1,
    ),
    "work without a row makes the interval busy where ranks step apart": (
        OF_ROW, more(steps=50.0, output=50.0), {"ranks": 2.0}, 11.1,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("at_10", "at_20", "both", "expected_s"), BUSY.values(), ids=BUSY)
def test_work_without_a_row_takes_time(
    at_10: dict[str, float], at_20: dict[str, float], both: dict[str, float], expected_s: float
) -> None:
    assert busy_s(at_10, at_20, **both) == pytest.approx(expected_s, abs=0.02)


# When a request was active, from its row

WITHOUT_PHASES = dict.fromkeys(("queue_s", "prefill_s", "decode_s"))


def one(ranges: TimeRanges) -> TimeRange:
    (time,) = zip(*ranges, strict=True)
    return TimeRange(*time)


@pytest.mark.parametrize(
    ("values", "prefill", "decode"),
    [
        ({"queue_s": 2.0, "prefill_s": 1.0, "decode_s": 4.0}, (102, 103), (103, 107)),
        # A row of the proxy alone.
        ({**WITHOUT_PHASES, "ttft_s": 1.5}, (100, 101.5), (101.5, 105)),
        ({**WITHOUT_PHASES, "ttft_s": None}, (100, 100), (100, 105)),
        ({"output_tokens": 1, "decode_s": None}, (100, 101), (101, 101)),
        ({"queue_s": -5.0, "prefill_s": -1.0, "decode_s": -2.0}, (100, 100), (100, 100)),
    ],
    ids=["all phases", "a first token", "no first token", "one token", "negative times"],
)
def test_prefill_follows_the_queue_and_decode_the_prefill(
    values: dict[str, Any], prefill: tuple[float, float], decode: tuple[float, float]
) -> None:
    found = active([request(1, 100.0, **values)])
    assert (one(found.prefill), one(found.decode)) == (prefill, decode)


@pytest.mark.parametrize("status", [Status.THROTTLED, Status.CANCELLED, Status.TIMEOUT])
def test_a_request_that_never_left_the_queue_was_not_active(status: Status) -> None:
    row = request(1, 0.0, **WITHOUT_PHASES, ttft_s=None, output_tokens=None, status=status)
    assert active([row]).rows.size == 0


@pytest.mark.parametrize("known", [{"prefill_s": 1.0}, {"ttft_s": 1.0}, {"output_tokens": 3}])
def test_a_cancelled_request_with_a_known_phase_was_active(known: dict[str, Any]) -> None:
    unknown: dict[str, Any] = {**WITHOUT_PHASES, "ttft_s": None, "output_tokens": None}
    row = request(1, 0.0, status=Status.CANCELLED, **(unknown | known))
    assert active([row]).wasted.tolist() == [True]


def test_the_first_token_ends_the_prefill_and_the_others_follow_evenly() -> None:
    found = active([request(1, 100.0)])
    assert found.output_in(TimeRange(100.0, 101.0)) == 0
    assert found.output_in(TimeRange(101.0, 103.0)) == pytest.approx(11)
    assert found.input_counted_in(TimeRange(100.0, 101.0)) == 0
    assert found.input_counted_in(TimeRange(101.0, 103.0)) == 100


def test_the_engine_s_cached_share_is_for_rows_without_cached_tokens() -> None:
    rows = [
        request(number, 0.0, input_tokens=100, cached_tokens=cached)
        for number, cached in enumerate((None, 0, 250))
    ]
    found = active(rows, 0.25)
    assert found.computed_tokens.tolist() == [75, 100, 0]
    assert found.cached_tokens.tolist() == [25, 0, 100]


TIMES = st.floats(-1e3, 1e3)
INTERVALS = st.tuples(TIMES, st.floats(0, 100)).map(lambda pair: TimeRange(pair[0], sum(pair)))
WINDOW = TimeRange(0.0, 60.0)


def covered(ranges: list[TimeRange], time: TimeRange = WINDOW) -> float:
    return covered_s(TimeRanges.of(ranges), time)


def test_time_in_two_intervals_is_counted_once_and_only_in_the_range() -> None:
    assert covered([TimeRange(5, 20), TimeRange(10, 15), TimeRange(15, 30)]) == 25
    assert covered([TimeRange(-10, 5), TimeRange(50, 90), TimeRange(70, 80)]) == 15
    # An empty range lies in the range that starts there.
    assert (TimeRange(0, 0).share_in(WINDOW), TimeRange(60, 60).share_in(WINDOW)) == (1, 0)


@given(INTERVALS, st.floats(0, 60))
def test_shares_in_ranges_that_follow_each_other_add_up(interval: TimeRange, cut: float) -> None:
    parts = [interval.share_in(TimeRange(*edges)) for edges in ((0.0, cut), (cut, 60.0))]
    assert sum(parts) == pytest.approx(interval.share_in(WINDOW), abs=1e-9)


@given(st.lists(INTERVALS | TIMES.map(lambda at: TimeRange(at, at)), max_size=8), INTERVALS)
def test_many_ranges_have_the_shares_of_each(intervals: list[TimeRange], time: TimeRange) -> None:
    ranges = TimeRanges.of(intervals)
    assert ranges.share_in(time).tolist() == [each.share_in(time) for each in intervals]
    assert ranges.within_s(time).tolist() == [each.within(time).length_s for each in intervals]


# Its parts add up to a little more than the minute.
@example(
    [TimeRange(0.0, 60.0), TimeRange(0.0, 1.7633851722942175), TimeRange(0.0, 34.15523124107097)],
    0.0,
)
@given(st.lists(INTERVALS, max_size=8), st.floats(0, 60))
def test_covered_time_adds_up_and_is_never_more_than_the_range(
    intervals: list[TimeRange], cut: float
) -> None:
    whole = covered(intervals)
    parts = [covered(intervals, TimeRange(*edges)) for edges in ((0.0, cut), (cut, 60.0))]
    assert sum(parts) == pytest.approx(whole, abs=1e-9)
    assert 0 <= whole <= 60
    assert (
        max((interval.within(WINDOW).length_s for interval in intervals), default=0) <= whole + 1e-9
    )
