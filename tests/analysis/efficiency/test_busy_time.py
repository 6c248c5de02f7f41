"""For how much of a minute an engine worked, from its samples and its requests."""

import pytest

from agent.analysis.efficiency.busy_time import TimeParts, time_parts
from agent.analysis.efficiency.engine_observation import IntervalState, minute_start_near, observe
from agent.analysis.efficiency.request_activity import request_activities
from agent.analysis.efficiency.time_range import TimeRange
from agent.records.engine import EngineSample
from agent.records.request import RequestRecord
from tests.analysis.cost.engine_days import reading, request, seen

TEN = TimeRange(0.0, 10.0)


def parts(
    samples: list[EngineSample], rows: list[RequestRecord] | None = None, window: TimeRange = TEN
) -> TimeParts:
    observed = seen(samples, window)
    return time_parts(observed, request_activities(rows or []))


def state(before: dict[str, float], after: dict[str, float]) -> IntervalState:
    (interval,) = seen([reading(0.0, **before), reading(10.0, **after)], TEN).intervals
    return interval.state


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"running": 2, "steps": 5}, {"running": 1, "steps": 9}, IntervalState.AT_WORK),
        # One long prefill gives no step with output.
        ({"running": 1, "steps": 5}, {"running": 1, "steps": 5}, IntervalState.AT_WORK),
        ({"running": 0, "steps": 5}, {"running": 0, "steps": 5}, IntervalState.IDLE),
        ({"running": 0, "steps": 5}, {"running": 0, "steps": 6}, IntervalState.AT_WORK),
        ({"running": 0, "steps": 5}, {"running": 3, "steps": 5}, IntervalState.AT_WORK),
        ({"running": 3, "steps": 5}, {"running": 0, "steps": 9}, IntervalState.AT_WORK),
        ({"output": 5}, {"output": 6}, IntervalState.AT_WORK),
        ({"output": 5}, {"output": 5}, IntervalState.IDLE),
        ({"running": 0}, {"running": 0}, IntervalState.IDLE),
        # A queue that nothing serves is no work.
        ({"running": 0, "waiting": 3}, {"running": 0, "waiting": 3}, IntervalState.IDLE),
        ({"waiting": 0}, {"waiting": 0}, IntervalState.UNREAD),
    ],
)
def test_two_samples_tell_what_was_between_them(
    before: dict[str, float], after: dict[str, float], told: IntervalState
) -> None:
    assert state(before, after) is told


def test_a_gap_in_the_samples_is_unknown_whatever_the_counters_say() -> None:
    gone = [reading(-1.0, running=0, steps=5), reading(20.0, running=0, steps=5)]
    assert parts(gone) == TimeParts(0, 0, 10)


def test_a_restart_is_unknown() -> None:
    assert parts([reading(0.0, 100.0, running=1), reading(10.0, 200.0, running=1)]).unknown_s == 10


def test_before_the_first_and_after_the_last_sample_all_is_unknown() -> None:
    idle = [reading(at, running=0, steps=5) for at in (2.0, 7.0)]
    assert parts(idle) == TimeParts(0, 5, 5)


def test_a_short_request_between_two_idle_samples_is_busy_for_as_long_as_it_took() -> None:
    samples = [reading(0.0, running=0, output=0), reading(10.0, running=0, output=21)]
    found = parts(samples, [request(1, 4.0, prefill_s=0.2, decode_s=0.8)])
    assert found == pytest.approx((1, 9, 0))


def test_a_wait_in_the_queue_is_no_work() -> None:
    samples = [reading(0.0, running=0, output=0), reading(10.0, running=0, output=21)]
    found = parts(samples, [request(1, 1.0, queue_s=5.0, prefill_s=1.0, decode_s=1.0)])
    assert found.busy_s == pytest.approx(2)


def test_work_that_no_row_tells_of_makes_the_busy_time_longer_in_proportion() -> None:
    samples = [reading(0.0, running=0, output=0), reading(10.0, running=0, output=63)]
    found = parts(samples, [request(1, 4.0, prefill_s=0.2, decode_s=0.8)])
    assert found.busy_s == pytest.approx(3)


def test_work_without_any_row_is_busy_all_the_time_at_most() -> None:
    samples = [reading(0.0, running=0, output=0), reading(10.0, running=0, output=1)]
    assert parts(samples).busy_s == 10


def test_requests_at_both_samples_may_be_different_ones_with_time_between() -> None:
    samples = [reading(0.0, running=1, output=0), reading(10.0, running=1, output=26)]
    rows = [
        request(1, -1.0, prefill_s=1.0, decode_s=2.0),
        request(2, 9.0, prefill_s=0.5, decode_s=2.5),
    ]
    assert parts(samples, rows).busy_s == pytest.approx(3)


def test_a_request_without_a_row_that_ran_at_both_samples_ran_all_the_time() -> None:
    samples = [reading(0.0, running=2, output=0), reading(10.0, running=1, output=21)]
    found = parts(samples, [request(1, -1.0, prefill_s=1.0, decode_s=2.0)])
    assert found.busy_s == pytest.approx(10)


def test_unread_time_is_busy_while_requests_were_seen_at_work() -> None:
    assert parts([], [request(1, 3.0, prefill_s=1.0, decode_s=3.0)]) == (4, 0, 6)


def test_a_minute_needs_length() -> None:
    with pytest.raises(ValueError, match="must end after it begins"):
        observe([], TimeRange(5.0, 5.0), max_gap_s=15)


def test_a_restarted_counter_counts_from_zero() -> None:
    samples = [reading(0.0, output=1000, steps=10), reading(10.0, output=30, steps=20)]
    growth = seen(samples, TEN).growth
    assert (growth.output_tokens, growth.steps) == (30, 20)


def test_a_minute_has_its_share_of_what_was_counted_around_it() -> None:
    samples = [reading(-5.0, output=0), reading(5.0, output=100), reading(15.0, output=140)]
    assert seen(samples, TEN).growth.output_tokens == pytest.approx(50 + 20)


def test_a_minute_best_begins_where_the_counters_were_read() -> None:
    moments = [57.0, 62.0, 67.0]
    assert minute_start_near(60.0, moments, max_gap_s=15) == 62.0
    assert minute_start_near(90.0, moments, max_gap_s=15) == 90.0


def test_rows_are_needed_as_far_as_the_samples_around_the_minute_reach() -> None:
    samples = [reading(at, running=0) for at in (-9.0, -3.0, 4.0, 11.0, 14.0)]
    intervals = seen(samples, TEN).intervals
    assert (intervals[0].time.from_at, intervals[-1].time.until) == (-3.0, 11.0)


@pytest.mark.parametrize(
    ("told", "full"),
    [
        ({"kv": 0.99, "waiting": 2}, True),
        ({"kv": 0.99, "waiting": 0}, False),
        ({"kv": 0.5, "waiting": 2}, False),
    ],
)
def test_a_cache_is_full_when_requests_wait_for_it(told: dict[str, float], full: bool) -> None:
    readings = [reading(0.0, running=1), reading(5.0, running=1, **told), reading(10.0, running=1)]
    assert seen(readings, TEN).cache_full_s == (5.0 if full else 0.0)


def test_preemptions_say_that_the_cache_was_full() -> None:
    samples = [reading(at, running=1, preemptions=float(at > 4)) for at in (0.0, 4.0, 6.0, 10.0)]
    assert seen(samples, TEN).cache_full_s == 2


def test_a_cache_that_was_not_read_was_not_full() -> None:
    gap = [reading(at, running=1, preemptions=at, kv=0.99, waiting=3) for at in (0.0, 40.0)]
    assert seen(gap, TEN).cache_full_s == 0
