"""Windows of time."""

import pytest

from agent.records.queries import Window


@pytest.mark.parametrize(("until", "length_s"), [(1010.25, 10.25), (1000.0, 0.001), (990.0, 0.001)])
def test_a_window_is_as_long_as_its_ends_are_apart_and_never_empty(
    until: float, length_s: float
) -> None:
    assert Window(from_s=1000, until=until).length_s == length_s
