"""Each word of a source for a GPU that it cannot read is judged, and in one way."""

import re
from itertools import combinations

from agent.catalog import gpu_problems
from agent.catalog.gpu_problems import EXPORTER_STALE, HELD, LOST, UNSEEN
from agent.catalog.reasons import INTERNAL
from agent.sources.nvml import library


def test_every_word_of_a_source_is_a_loss_a_held_call_or_blindness() -> None:
    declared = {value for value in vars(gpu_problems).values() if isinstance(value, str)}
    words = {word for word in declared if re.fullmatch("[a-z]+(_[a-z]+)+", word)}
    assert {*library.REASONS.values(), INTERNAL} | words <= LOST | HELD | set(UNSEEN)


def test_no_word_is_judged_in_two_ways() -> None:
    ways = (LOST, HELD, frozenset(UNSEEN))
    assert not any(one & other for one, other in combinations(ways, 2))


def test_a_stale_exporter_and_an_error_of_the_agent_are_no_lost_gpu() -> None:
    assert {EXPORTER_STALE, INTERNAL} <= set(UNSEEN)
