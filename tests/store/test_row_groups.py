"""The parts of a window of which a sample of requests is."""

from itertools import pairwise

import pytest

from agent.records.queries import Window
from agent.store.row_groups import SLICES, sampled


@pytest.mark.parametrize(
    ("length_s", "one_in"),
    [(60, 2), (300, 3), (300, 10), (900, 2), (3000, 10), (3600, 7), (3600, 40), (86_400, 50)],
)
def test_a_sample_has_one_in_so_many_seconds_of_a_window(length_s: int, one_in: int) -> None:
    window = Window(from_s=1_000, until=1_000.0 + length_s)
    parts = sampled(window, one_in)
    assert sum(part.length_s for part in parts) == pytest.approx(length_s / one_in, rel=0.07)
    assert len(parts) <= 2 * SLICES + 1
    assert window.from_s <= parts[0].from_s
    assert all(part.until <= later.from_s for part, later in pairwise(parts))
    assert parts[-1].until <= window.until


def test_all_of_a_window_is_one_part() -> None:
    window = Window(from_s=1_000, until=1_300.5)
    assert sampled(window, 1) == [window]
