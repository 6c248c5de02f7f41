"""Error budgets against the example of Google's workbook on site reliability, chapter 2."""

import pytest

from agent.analysis.burn_rates import error_budget


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
