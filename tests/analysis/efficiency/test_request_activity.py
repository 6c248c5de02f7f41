"""When a request was active, from its row."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.analysis.efficiency.request_activity import Activities, TimeRange, TimeRanges, covered_s
from agent.records.request import Status
from tests.analysis.cost.engine_days import request
from tests.records.columns import active

WITHOUT_PHASES = dict.fromkeys(("queue_s", "prefill_s", "decode_s"))


def activity(**given: Any) -> Activities:
    return active([request(1, 100.0, **given)])


def phases(**given: Any) -> tuple[TimeRange, TimeRange]:
    found = activity(**given)
    return one(found.prefill), one(found.decode)


def one(ranges: TimeRanges) -> TimeRange:
    (time,) = zip(*ranges, strict=True)
    return TimeRange(*time)


def test_prefill_follows_the_queue_and_decode_the_prefill() -> None:
    assert phases(queue_s=2.0, prefill_s=1.0, decode_s=4.0) == ((102, 103), (103, 107))


def test_a_row_of_the_proxy_alone_has_phases_from_its_first_token_and_its_end() -> None:
    assert phases(**WITHOUT_PHASES, ttft_s=1.5) == ((100, 101.5), (101.5, 105))


def test_without_a_first_token_the_prefill_has_no_length() -> None:
    assert phases(**WITHOUT_PHASES, ttft_s=None) == ((100, 100), (100, 105))


def test_one_output_token_takes_no_decode() -> None:
    assert one(activity(output_tokens=1, decode_s=None).decode) == (101, 101)


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
    found = activity(prefill_s=1.0, decode_s=4.0, output_tokens=21)
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


def test_a_negative_time_counts_as_zero() -> None:
    assert phases(queue_s=-5.0, prefill_s=-1.0, decode_s=-2.0) == ((100, 100), (100, 100))


TIMES = st.floats(-1e3, 1e3)
INTERVALS = st.tuples(TIMES, st.floats(0, 100)).map(lambda pair: TimeRange(pair[0], sum(pair)))
WINDOW = TimeRange(0.0, 60.0)


def covered(ranges: list[TimeRange], time: TimeRange = WINDOW) -> float:
    return covered_s(TimeRanges.of(ranges), time)


def test_time_in_two_intervals_is_counted_once() -> None:
    assert covered([TimeRange(5, 20), TimeRange(10, 15), TimeRange(15, 30)]) == 25


def test_only_time_in_the_range_counts() -> None:
    assert covered([TimeRange(-10, 5), TimeRange(50, 90), TimeRange(70, 80)]) == 15


def test_an_empty_range_lies_in_the_range_that_starts_there() -> None:
    assert TimeRange(0, 0).share_in(WINDOW) == 1
    assert TimeRange(60, 60).share_in(WINDOW) == 0


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
