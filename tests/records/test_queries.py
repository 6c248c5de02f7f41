"""Windows of queries."""

import pytest

from agent.records.queries import Window


@pytest.mark.parametrize(("until", "length_s"), [(1010.25, 10.25), (1000.0, 0.001), (990.0, 0.001)])
def test_the_length_of_a_window_is_never_zero(until: float, length_s: float) -> None:
    assert Window(from_s=1000, until=until).length_s == length_s
