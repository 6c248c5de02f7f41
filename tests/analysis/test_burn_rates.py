"""Error budgets and burn rates: which alerts a target allows, and how soon they fire."""

import pytest

from agent.analysis.burn_rates import MAX_THRESHOLD, Burn, error_budget, plan


def test_half_the_budget_of_the_workbooks_example_is_spent_by_one_outage() -> None:
    """99.9 % of 3,000,000 requests in four weeks allow 3,000 errors; an outage had 1,500."""
    budget = error_budget(met=2_998_500, missed=1_500, target=0.999)
    assert budget.allowed == pytest.approx(3_000)
    assert budget.left == pytest.approx(0.5)


def test_a_budget_that_is_overspent_is_below_zero() -> None:
    assert error_budget(met=80, missed=20, target=0.95).left == pytest.approx(-3.0)


def test_a_budget_without_judged_requests_is_unknown_and_one_without_misses_is_whole() -> None:
    assert error_budget(met=0, missed=0, target=0.95).left is None
    assert error_budget(met=7, missed=0, target=0.95).left == 1.0


DAY_S = 86400.0
MONTH_S = 30 * DAY_S


def burn(target: float, number: int) -> Burn:
    """The tier of this number for a target over 30 days, whether it can fire or not."""
    found = plan(target, MONTH_S)
    return next(burn for burn in (*found.kept, *found.dead) if burn.tier.number == number)


def test_the_windows_equal_those_of_the_sre_workbook() -> None:
    hours = [(burn.long_s / 3600, burn.short_s / 60) for burn in plan(0.999, MONTH_S).kept]
    assert hours == [(1, 5), (6, 30), (24, 120), (72, 360)]


# Threshold, and minutes until it fires when all, half and a quarter of the requests miss.
TIMES = [
    (0.999, 1, 0.0144, 0.9, 1.7, 3.5),
    (0.999, 2, 0.006, 2.2, 4.3, 8.6),
    (0.99, 1, 0.144, 8.6, 17, 35),
    (0.99, 2, 0.06, 22, 43, 86),
    (0.95, 1, 0.72, 43, None, None),
    (0.95, 2, 0.30, 108, 216, None),
    (0.95, 3, 0.15, 216, 432, 864),
    (0.95, 4, 0.05, 216, 432, 864),
    (0.9, 2, 0.60, 216, None, None),
]


@pytest.mark.parametrize(
    ("target", "number", "threshold", "all_", "half", "quarter"), TIMES, ids=str
)
def test_detection_times_follow_from_the_thresholds(
    target: float,
    number: int,
    threshold: float,
    all_: float,
    half: float | None,
    quarter: float | None,
) -> None:
    tier = burn(target, number)
    assert float(tier.threshold) == threshold
    for ratio, minutes in ((1.0, all_), (0.5, half), (0.25, quarter)):
        found = tier.detects_in_s(ratio)
        expected = None if minutes is None else pytest.approx(minutes * 60, rel=0.05)
        assert found == expected


def test_thresholds_are_exact_decimals() -> None:
    assert [str(burn.threshold) for burn in plan(0.999, MONTH_S).kept] == [
        "0.0144",
        "0.006",
        "0.003",
        "0.001",
    ]


def test_a_tier_that_fires_only_when_all_requests_miss_is_dead() -> None:
    found = plan(0.9, MONTH_S)
    assert [burn.tier.number for burn in found.dead] == [1]
    assert [burn.tier.number for burn in found.kept] == [2, 3, 4]
    assert all(burn.threshold < MAX_THRESHOLD for burn in found.kept)


@pytest.mark.parametrize("target", [0.05, 0.5, 0.8, 0.9, 0.95, 0.97])
def test_a_target_with_slow_or_dead_pages_has_an_outage_rule_that_can_fire(target: float) -> None:
    outage = plan(target, MONTH_S).outage
    assert outage is not None
    total = outage.detects_in_s(1.0)
    assert total is not None
    assert total <= 5 * 60
    # Misses that the target allows must never be an outage.
    assert outage.detects_in_s(1 - target) is None


@pytest.mark.parametrize("target", [0.99, 0.999])
def test_a_target_whose_first_tier_is_fast_needs_no_outage_rule(target: float) -> None:
    assert plan(target, MONTH_S).outage is None


def test_a_shorter_period_shortens_the_windows_and_keeps_the_thresholds() -> None:
    week = plan(0.99, 7 * DAY_S).kept
    assert [burn.long_s for burn in week] == [14 * 60, 84 * 60, 5.6 * 3600, 16.8 * 3600]
    assert [burn.threshold for burn in week] == [
        burn.threshold for burn in plan(0.99, MONTH_S).kept
    ]
