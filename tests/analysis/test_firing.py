"""When the pages on an error budget fired, by the verdicts of each minute."""

from collections.abc import Iterable

import pytest

from agent.analysis.burn_rates import plan
from agent.analysis.firing import firings, minute_verdicts, pages_look_back_s

MONTH_S = 30 * 86400.0
MINUTES = 12 * 60
PER_MINUTE = 100

Fired = list[tuple[str, float | None, float | None]]


def pages(target: float, missed: dict[int, int], shown_from: int = 0) -> Fired:
    """Rule, begin and end in minutes; of 100 requests a minute so many missed."""
    counted = {
        60 * minute: (PER_MINUTE - missed.get(minute, 0), missed.get(minute, 0))
        for minute in range(MINUTES)
    }
    found = firings(
        plan(target, MONTH_S), minute_verdicts(0, 60 * MINUTES, counted), 60 * shown_from
    )
    return [(each.rule, _minutes(each.from_s), _minutes(each.until_s)) for each in found]


def _minutes(at: float | None) -> float | None:
    return None if at is None else at / 60


def missing(minutes: Iterable[int], each: int = PER_MINUTE) -> dict[int, int]:
    return dict.fromkeys(minutes, each)


def test_a_total_failure_pages_after_its_share_of_the_hour_and_until_five_minutes_are_good() -> (
    None
):
    # The 9th minute makes 15 % of the hour, of which 14.4 % are too many; the alert waits for two
    # minutes. Of the 5 minutes after the 14th, none has a miss.
    assert pages(0.99, missing(range(400, 410))) == [("fast burn", 411, 415)]


def test_a_slow_burn_is_no_page_soon_after_a_fast_one() -> None:
    assert pages(0.99, missing(range(400, 430))) == [("fast burn", 411, 435)]


def test_few_misses_over_hours_page_as_a_slow_burn() -> None:
    # 10 % of the requests: 6 % of 6 hours after 217 minutes.
    assert pages(0.99, missing(range(360, MINUTES), 10)) == [("slow burn", 360 + 219, None)]


def test_a_target_without_a_fast_page_has_an_outage() -> None:
    # 55 % of 5 minutes after the third; the last evaluation above it is two minutes after the end.
    assert pages(0.9, missing(range(400, 420))) == [("outage", 405, 423)]


def test_a_single_odd_minute_and_a_few_requests_do_not_page() -> None:
    assert pages(0.9, missing([400, 401])) == []
    quiet = {60 * minute: (0, 0) for minute in range(MINUTES)} | {60 * 400: (0, 4)}
    found = plan(0.99, MONTH_S)
    assert firings(found, minute_verdicts(0, 60 * MINUTES, quiet), 0) == []
    assert firings(found, minute_verdicts(0, 60 * MINUTES, quiet | {60 * 400: (0, 5)}), 0) != []


@pytest.mark.parametrize(
    ("shown_from", "expected"),
    [(412, [("fast burn", None, 415)]), (415, []), (411, [("fast burn", None, 415)])],
)
def test_what_fired_before_the_window_has_no_begin(shown_from: int, expected: Fired) -> None:
    assert pages(0.99, missing(range(400, 410)), shown_from) == expected


def test_pages_look_back_as_far_as_their_longest_window() -> None:
    assert pages_look_back_s([plan(0.99, MONTH_S)]) == 6 * 3600 + 120
    assert pages_look_back_s([]) == 120
