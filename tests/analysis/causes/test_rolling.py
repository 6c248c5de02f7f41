"""Sums over periods and rolling quantiles, against adding up and sorting all values."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.causes.rolling import SLOT_S, SLOTS, RollingQuantile, RunningSums

_rows = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.floats(0.01, 2.0), st.floats(0.0, 50.0)), max_size=40
)


def _laid_out(rows: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """Rows of gap, length and value as begin, end and value."""
    laid, at = [], 100.0
    for gap, length, value in rows:
        begin = at + gap
        at = begin + length
        laid.append((begin, at, value))
    return laid


@given(_rows, st.floats(90.0, 250.0), st.floats(0.0, 100.0))
def test_a_period_has_the_part_of_each_row_that_lies_in_it(
    rows: list[tuple[float, float, float]], start: float, length: float
) -> None:
    sums, laid = RunningSums(1, max_rows=1000), _laid_out(rows)
    for begin, end, value in laid:
        sums.add(begin, end, (value,))
    end_of = start + length
    covered = [max(0.0, min(end_of, end) - max(start, begin)) for begin, end, _ in laid]
    parts = [
        value * part / (end - begin)
        for (begin, end, value), part in zip(laid, covered, strict=True)
    ]
    assert sums.between(start, end_of) == pytest.approx([sum(covered), sum(parts)], abs=1e-6)


def test_only_the_newest_rows_are_kept() -> None:
    sums = RunningSums(1, max_rows=10)
    for second in range(1000):
        sums.add(second, second + 1, (1.0,))
    assert len(sums) <= 20
    assert sums.between(995, 1000) == pytest.approx([5.0, 5.0])
    assert sums.between(0, 1000)[1] <= 20


def test_short_rows_are_merged_without_losing_any() -> None:
    sums = RunningSums(1, max_rows=1000, width_s=0.1)
    for number in range(1000):
        sums.add(number / 100, (number + 1) / 100, (1.0,))
    assert len(sums) <= 110
    assert sums.between(0, 10) == pytest.approx([10.0, 1000.0])
    assert sums.between(4, 5)[1] == pytest.approx(100.0, abs=1.0)


@pytest.mark.parametrize("q", [0.2, 0.5])
def test_it_is_the_quantile_of_the_last_hour(q: float) -> None:
    random, rolling, values = Random(3), RollingQuantile(q), []
    for second in range(6000):
        value = random.lognormvariate(-3.0, 0.5) * (1 + second / 3000)
        rolling.add(second, value)
        values.append((second, value))
    from_second = (5999 // SLOT_S - SLOTS + 1) * SLOT_S
    last = sorted(value for second, value in values if second >= from_second)
    assert rolling.count == len(last)
    # Within the error of a bin, and the twentieth of new values before it is computed anew.
    assert rolling.value() == pytest.approx(last[int(q * len(last))], rel=0.03)


def test_old_values_go() -> None:
    rolling = RollingQuantile(0.5)
    for second in range(1000):
        rolling.add(second, 1.0)
    rolling.add(SLOT_S * (SLOTS + 10), 5.0)
    assert rolling.count == 1
    assert rolling.value() == pytest.approx(5.0, rel=0.01)
    assert rolling.value(at_least=2) is None
