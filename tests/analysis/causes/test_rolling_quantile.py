"""The rolling quantile against sorting the values of the last hour."""

from random import Random

import pytest

from agent.analysis.causes.rolling import SLOT_S, SLOTS, RollingQuantile


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
