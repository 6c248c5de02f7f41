"""Ratios of many booked minutes."""

from typing import Any

import pytest

from agent.analysis.cost.bill import CostRatios, spending
from agent.analysis.cost.weights import Method
from agent.analysis.efficiency.time_range import TimeRange
from agent.records.minute import MinuteRow
from tests.analysis.cost.engine_days import LLAMA_ON_H100, engine_sample, minute_row, request

# One request of 100 input and 21 output tokens, busy for 5 of 60 s; a sample each 5 s.
SAMPLES = [
    engine_sample(
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


def minutes(**of_first: Any) -> tuple[MinuteRow, MinuteRow]:
    """Two minutes; the request ended in the first."""
    first = minute_row(SAMPLES, ONE, time=FIRST, **of_first)
    return first, minute_row(SAMPLES, ONE, time=SECOND, requests=0)


def ratios(*rows: MinuteRow) -> CostRatios:
    found = spending(rows).ratios
    assert found is not None
    return found


def test_active_prices_use_busy_time_and_overhead_scales_them_to_the_bill() -> None:
    found = ratios(*minutes())
    assert found.per_request == pytest.approx(5)
    assert found.overhead == pytest.approx(24)
    assert found.allocated_per_request == pytest.approx(120)
    assert found.per_million_output is not None
    assert found.per_million_input is not None
    in_and_out = found.per_million_input * 100 + found.per_million_output * 21
    assert in_and_out == pytest.approx(5e6)


def test_the_price_of_good_tokens_includes_the_whole_bill() -> None:
    found = ratios(*minutes(good_tokens=10))
    assert found.allocated_per_million_good_tokens == pytest.approx(120 / 10 * 1e6)


def test_a_price_per_zero_tokens_is_unknown() -> None:
    found = ratios(minute_row(SAMPLES, time=SECOND))
    assert (found.per_million_output, found.per_million_input, found.per_request) == (None,) * 3
    assert (found.overhead, found.allocated_per_million_good_tokens) == (None, None)


def test_a_window_has_the_methods_of_all_its_minutes() -> None:
    known = minute_row(SAMPLES, ONE, LLAMA_ON_H100, FIRST)
    assert spending([known, minutes()[1]]).methods == {Method.ROOFLINE, Method.TOKENS}


def test_a_window_without_minutes_has_no_cost() -> None:
    found = spending([])
    assert (found.cost, found.ratios, found.joules, found.gpu_hours) == (None,) * 4
