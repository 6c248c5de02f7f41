"""The cost of several minutes, some without a price or energy."""

import pytest

from agent.analysis.cost.bill import Spending, spending
from agent.records.minute import MinuteRow
from tests.records.minutes import UNKNOWN, minute


def spent(*minutes: MinuteRow) -> Spending:
    return spending(minutes)


def test_unpriced_minutes_are_counted_and_the_others_have_their_cost() -> None:
    found = spent(minute(0), minute(1, **UNKNOWN), minute(2))
    assert found.bill_usd == 2.0
    assert (found.priced_s, found.unpriced_s) == (120, 60)


def test_requests_and_tokens_of_an_unpriced_minute_do_not_change_the_ratios() -> None:
    with_unpriced, priced = spent(minute(0), minute(1, **UNKNOWN)).ratios, spent(minute(0)).ratios
    assert with_unpriced == priced is not None


def test_without_any_price_there_is_no_cost() -> None:
    found = spent(minute(0, **UNKNOWN))
    assert (found.cost, found.ratios, found.priced_s, found.unpriced_s) == (None, None, 0, 60)


def test_gpus_that_cost_nothing_have_a_price_and_a_bill_of_zero() -> None:
    free = {name: 0.0 for name in UNKNOWN if name.endswith("_usd")}
    found = spent(minute(0, **free))
    assert found.ratios is not None
    assert (found.bill_usd, found.priced_s, found.unpriced_s) == (0, 60, 0)
    assert (found.ratios.per_request, found.ratios.per_million_output) == (0, 0)
    assert found.ratios.overhead is None


def test_energy_per_token_uses_all_tokens_that_the_engine_counted() -> None:
    """Rows have 200 of 300 tokens."""
    found = spent(minute(0, counted_output_tokens=300.0))
    assert found.joules_per_output_token == pytest.approx(20)


def test_energy_per_token_needs_no_rows() -> None:
    found = spent(minute(0, output_tokens=0.0, requests=0))
    assert found.joules_per_output_token == pytest.approx(30)


def test_tokens_of_a_minute_without_energy_do_not_count() -> None:
    found = spent(minute(0), minute(1, joules=None))
    assert found.joules is None
    assert found.joules_per_output_token == pytest.approx(30)


def test_unseen_and_idle_time_are_overhead_of_the_requests() -> None:
    """Of a dollar, 70 cents belong to the requests and 5 cents are unseen."""
    ratios = spent(minute(0)).ratios
    assert ratios is not None
    assert ratios.overhead == pytest.approx(1 / 0.7)
