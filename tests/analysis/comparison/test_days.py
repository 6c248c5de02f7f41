"""Whole days are compared hour by hour: their pattern is no noise, and load is no slowness."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from agent.analysis.comparison.cells import split_runs
from agent.analysis.comparison.comparing import ComparedLine, Comparison, Outcome, compare
from agent.analysis.comparison.run_columns import RunColumns
from tests.analysis.comparison.day_runs import DayTraffic, joined, slower

PAIRS = 8


@cache
def days(number: int = PAIRS + 1, seed: int = 7) -> Sequence[RunColumns]:
    return DayTraffic(seed=seed, days=number, requests_per_day=20_000).runs()


def outcomes(factor: float) -> Counter[Outcome]:
    pairs = zip(days(), days()[1:], strict=False)
    return Counter(compare(before, slower(after, factor)).outcome for before, after in pairs)


def line_of(found: Comparison, name: str) -> ComparedLine:
    (line,) = [each for each in found.lines if each.measure.name == name]
    return line


def test_equal_days_are_never_better_or_worse() -> None:
    found = outcomes(1.0)
    assert found[Outcome.WORSE] + found[Outcome.BETTER] == 0, found
    assert found[Outcome.NO_EVIDENCE] >= PAIRS * 3 / 4, found


def test_a_ttft_that_is_a_fifth_longer_is_found_in_three_of_four_pairs_of_days() -> None:
    assert outcomes(1.2)[Outcome.WORSE] >= PAIRS * 3 / 4


def test_a_doubled_ttft_is_found_in_all_pairs_of_days() -> None:
    assert outcomes(2.0)[Outcome.WORSE] == PAIRS


def test_the_change_of_a_percentile_has_an_interval_at_the_same_hours_and_load() -> None:
    first, second = days()[:2]
    found = compare(first, slower(second, 1.5))
    line = line_of(found, "TTFT p50")
    assert line.like_for_like is not None
    assert line.like_for_like.low < 0.5 < line.like_for_like.high
    # How much the busiest hours of days vary, one day does not tell.
    assert line.before is not None
    assert np.isnan(line.before.high)


def test_a_day_with_more_load_is_not_called_slower() -> None:
    # A twelfth more, too little to be called a change of load.
    quiet, busy = (
        DayTraffic(seed=3, days=4, requests_per_day=number, rate_of_day=0.0, busy=busy).runs()
        for number, busy in ((6000, 0.45), (6500, 0.4875))
    )
    raw, like = [], []
    for before, after in zip(quiet, busy, strict=True):
        line = line_of(compare(before, after), "TTFT p50")
        assert line.outcome is not Outcome.WORSE
        assert line.like_for_like is not None
        raw.append(line.change or 0.0)
        like.append(line.like_for_like.value)
    # Queues are longer, as the load explains.
    assert np.mean(raw) > 0.1
    assert abs(np.mean(like)) < 0.03


def test_a_weekend_is_another_load() -> None:
    week = DayTraffic(seed=5, days=7, requests_per_day=6000, weekend=0.5).runs()
    assert compare(week[4], week[5]).outcome is Outcome.LOAD_CHANGED


def test_weeks_are_compared_by_the_hour_of_the_week() -> None:
    traffic = DayTraffic(seed=9, days=14, requests_per_day=2000, weekend=0.5).runs()
    first, second = joined(traffic[:7]), joined(traffic[7:])
    split, _ = split_runs(first, second)
    assert split.pattern is not None
    assert split.pattern.number == 7 * 24
    # The weekend is in both, and is no noise.
    same = compare(first, second)
    assert not {Outcome.WORSE, Outcome.BETTER} & {line.outcome for line in same.lines}
    assert compare(first, slower(second, 1.2)).outcome is Outcome.WORSE


@pytest.mark.parametrize("hours", [5, 36])
def test_only_whole_days_follow_the_clock(hours: int) -> None:
    first, second = days()[:2]
    other = replace(second, length_s=hours * 3600.0)
    assert split_runs(first, other)[0].pattern is None
    assert split_runs(first, replace(second, began_at=None))[0].pattern is None
    # A database may begin some minutes late.
    assert split_runs(first, replace(second, length_s=second.length_s - 900))[0].pattern is not None
    # By its hours, not by its begin.
    noon = replace(second, began_at=(second.began_at or 0) + 12 * 3600)
    pattern = split_runs(first, noon)[1].pattern
    assert pattern is not None
    assert pattern.places[0] == 12


def test_an_evening_in_which_all_was_slow_is_one_period() -> None:
    first, second = days()[:2]
    evening = (second.ended_s > 19 * 3600) & (second.ended_s < 21 * 3600)
    late = replace(second, tpot_s=np.where(evening, 5.0, 1.0) * second.tpot_s)
    line = line_of(compare(first, late), "TPOT p95")
    assert line.outcome is Outcome.ONE_PERIOD
    assert line.period is not None
    # The hours that make the difference, and no more.
    assert 19 * 3600 <= line.period.begin_s < line.period.end_s <= 21 * 3600
