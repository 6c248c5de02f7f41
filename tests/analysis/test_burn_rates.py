"""Error budgets and burn rates: which alerts a target allows, and how soon they fire."""

import pytest

from agent.analysis.burn_rates import MAX_THRESHOLD, error_budget, plan

DAY_S = 86400.0
MONTH_S = 30 * DAY_S


@pytest.mark.parametrize(
    ("met", "missed", "target", "allowed", "left"),
    [
        # The workbook's example: 99.9 % of 3,000,000 allow 3,000 errors; an outage had 1,500.
        (2_998_500, 1_500, 0.999, 3_000, 0.5),
        (80, 20, 0.95, 5, -3.0),
        (0, 0, 0.95, 0, None),
        (7, 0, 0.95, 0.35, 1.0),
    ],
)
def test_the_rest_of_a_budget(
    met: int, missed: int, target: float, allowed: float, left: float | None
) -> None:
    budget = error_budget(met=met, missed=missed, target=target)
    assert budget.allowed == pytest.approx(allowed)
    assert budget.left == (left and pytest.approx(left))


def test_the_windows_and_thresholds_equal_those_of_the_sre_workbook() -> None:
    tiers = plan(0.999, MONTH_S).kept
    hours = [(burn.long_s / 3600, burn.short_s / 60) for burn in tiers]
    assert hours == [(1, 5), (6, 30), (24, 120), (72, 360)]
    # Exact decimals.
    assert [str(burn.threshold) for burn in tiers] == ["0.0144", "0.006", "0.003", "0.001"]


# Target, tier, and minutes until it fires when all, half and a quarter of the requests miss.
@pytest.mark.parametrize(
    ("target", "number", "minutes"),
    [
        (0.999, 1, (0.9, 1.7, 3.5)),
        (0.99, 2, (22, 43, 86)),
        (0.95, 1, (43, None, None)),
        (0.95, 2, (108, 216, None)),
        (0.95, 4, (216, 432, 864)),
        (0.9, 2, (216, None, None)),
    ],
)
def test_detection_times_follow_from_the_thresholds(
    target: float, number: int, minutes: tuple[float | None, ...]
) -> None:
    (tier,) = [burn for burn in plan(target, MONTH_S).kept if burn.tier.number == number]
    for ratio, expected in zip((1.0, 0.5, 0.25), minutes, strict=True):
        found = tier.detects_in_s(ratio)
        assert found == (expected and pytest.approx(expected * 60, rel=0.05))


def test_a_tier_that_fires_only_when_all_requests_miss_is_dead() -> None:
    found = plan(0.9, MONTH_S)
    assert [burn.tier.number for burn in found.dead] == [1]
    assert [burn.tier.number for burn in found.kept] == [2, 3, 4]
    assert all(burn.threshold < MAX_THRESHOLD for burn in found.kept)


@pytest.mark.parametrize("target", [0.05, 0.5, 0.8, 0.9, 0.95, 0.97, 0.99, 0.999])
def test_a_target_with_slow_or_dead_pages_has_an_outage_rule_that_can_fire(target: float) -> None:
    outage = plan(target, MONTH_S).outage
    assert (outage is None) == (target >= 0.99)
    if outage is not None:
        assert (outage.detects_in_s(1.0) or MONTH_S) <= 5 * 60
        # Misses that the target allows must never be an outage.
        assert outage.detects_in_s(1 - target) is None


def test_a_shorter_period_shortens_the_windows_and_keeps_the_thresholds() -> None:
    week, month = plan(0.99, 7 * DAY_S).kept, plan(0.99, MONTH_S).kept
    assert [burn.long_s for burn in week] == [14 * 60, 84 * 60, 5.6 * 3600, 16.8 * 3600]
    assert [burn.threshold for burn in week] == [burn.threshold for burn in month]
