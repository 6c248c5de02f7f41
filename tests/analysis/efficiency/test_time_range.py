"""Ranges of time."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.analysis.efficiency.time_range import TimeRange, TimeRanges, covered_s

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
