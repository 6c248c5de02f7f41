"""Many windows together."""

import pytest

from agent.analysis.cost.period import cost_ratios, window_cost
from agent.analysis.cost.weights import Method
from agent.analysis.efficiency.time_range import TimeRange
from tests.analysis.cost.engine_days import LLAMA_ON_H100, cost, reading, request

# One request of 100 tokens in and 21 out, at work for 5 of 60 s; a reading each 5 s shows it.
READINGS = [
    reading(
        5.0 * step,
        running=0.0,
        output=21.0 if step > 2 else 0.0,
        input=100.0 if step > 2 else 0.0,
        cached=0.0,
    )
    for step in range(25)
]
ONE = [request(1, 10.0)]
FIRST, SECOND = TimeRange(0.0, 60.0), TimeRange(60.0, 120.0)
MINUTES = [cost(READINGS, ONE, FIRST), cost(READINGS, ONE, SECOND)]


def test_active_prices_are_of_busy_time_and_overhead_brings_them_to_the_bill() -> None:
    found = cost_ratios(window_cost(MINUTES), requests=1, good_tokens=21)
    assert found is not None
    assert found.per_request == pytest.approx(5)
    assert found.overhead == pytest.approx(24)
    assert found.allocated_per_request == pytest.approx(120)
    assert found.per_million_output is not None
    assert found.per_million_input is not None
    in_and_out = found.per_million_input * 100 + found.per_million_output * 21
    assert in_and_out == pytest.approx(5e6)


def test_tokens_that_met_the_objective_bear_the_whole_bill() -> None:
    found = cost_ratios(window_cost(MINUTES), requests=2, good_tokens=10)
    assert found is not None
    assert found.allocated_per_million_good_tokens == pytest.approx(120 / 10 * 1e6)


def test_per_nothing_is_unknown_and_not_zero() -> None:
    found = cost_ratios(window_cost([cost(READINGS, [], SECOND)]), requests=0, good_tokens=0)
    assert found is not None
    assert (found.per_million_output, found.per_million_input, found.per_request) == (None,) * 3
    assert (found.overhead, found.allocated_per_million_good_tokens) == (None, None)


def test_a_period_tells_all_the_methods_it_was_counted_with() -> None:
    known = cost(READINGS, ONE, FIRST, LLAMA_ON_H100)
    both = window_cost([known, MINUTES[1]])
    assert both is not None
    assert both.methods == {Method.ROOFLINE, Method.TOKENS}


def test_a_period_without_a_price_has_no_cost() -> None:
    assert window_cost([]) is None
    assert cost_ratios(None, requests=1, good_tokens=1) is None
