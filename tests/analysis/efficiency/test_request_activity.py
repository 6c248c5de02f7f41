"""When a request was active, from its row."""

from typing import Any

import pytest

from agent.analysis.efficiency.request_activity import Activities
from agent.analysis.efficiency.time_range import TimeRange, TimeRanges
from agent.records.request import Status
from tests.analysis.cost.engine_days import request
from tests.records.booking import active

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
