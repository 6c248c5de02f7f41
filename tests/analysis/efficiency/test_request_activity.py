"""When a request was worked on, as far as its row tells."""

from typing import Any

import pytest

from agent.analysis.efficiency.request_activity import RequestActivity, request_activities
from agent.analysis.efficiency.time_range import TimeRange
from agent.records.request import Status
from tests.analysis.cost.engine_days import request

WITHOUT_PHASES = dict.fromkeys(("queue_s", "prefill_s", "decode_s"))


def active(**told: Any) -> RequestActivity:
    (only,) = request_activities([request(1, 100.0, **told)])
    return only


def test_prefill_follows_the_queue_and_decode_the_prefill() -> None:
    found = active(queue_s=2.0, prefill_s=1.0, decode_s=4.0)
    assert (found.prefill, found.decode) == ((102, 103), (103, 107))


def test_a_row_of_the_proxy_alone_has_its_first_token_and_its_end() -> None:
    found = active(**WITHOUT_PHASES, ttft_s=1.5)
    assert (found.prefill, found.decode) == ((100, 101.5), (101.5, 105))


def test_without_a_first_token_the_prefill_is_taken_to_be_a_moment() -> None:
    found = active(**WITHOUT_PHASES, ttft_s=None)
    assert (found.prefill, found.decode) == ((100, 100), (100, 105))


def test_one_output_token_takes_no_decode() -> None:
    assert active(output_tokens=1, decode_s=None).decode == (101, 101)


@pytest.mark.parametrize("status", [Status.THROTTLED, Status.CANCELLED, Status.TIMEOUT])
def test_what_nobody_saw_begin_was_not_worked_on(status: Status) -> None:
    told = request(1, 0.0, **WITHOUT_PHASES, ttft_s=None, output_tokens=None, status=status)
    assert request_activities([told]) == []


@pytest.mark.parametrize("seen", [{"prefill_s": 1.0}, {"ttft_s": 1.0}, {"output_tokens": 3}])
def test_what_was_given_up_at_work_was_worked_on(seen: dict[str, Any]) -> None:
    nothing: dict[str, Any] = {**WITHOUT_PHASES, "ttft_s": None, "output_tokens": None}
    told = request(1, 0.0, status=Status.CANCELLED, **(nothing | seen))
    assert [found.wasted for found in request_activities([told])] == [True]


def test_the_first_token_comes_with_the_prefill_and_the_others_evenly() -> None:
    found = active(prefill_s=1.0, decode_s=4.0, output_tokens=21)
    assert found.output_in(TimeRange(100.0, 101.0)) == 0
    assert found.output_in(TimeRange(101.0, 103.0)) == pytest.approx(11)
    assert found.input_counted_in(TimeRange(100.0, 101.0)) == 0
    assert found.input_counted_in(TimeRange(101.0, 103.0)) == 100


def test_the_engine_s_share_of_cached_tokens_is_for_rows_that_do_not_tell() -> None:
    rows = [
        request(number, 0.0, input_tokens=100, cached_tokens=told)
        for number, told in enumerate((None, 0, 250))
    ]
    found = [(row.computed_tokens, row.cached_tokens) for row in request_activities(rows, 0.25)]
    assert found == [(75, 25), (100, 0), (0, 100)]


def test_a_time_below_zero_is_none() -> None:
    found = active(queue_s=-5.0, prefill_s=-1.0, decode_s=-2.0)
    assert (found.prefill, found.decode) == ((100, 100), (100, 100))
