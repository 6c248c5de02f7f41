"""Each problem of reading a GPU belongs to exactly one group."""

import re
from itertools import combinations

from agent.catalog import gpu_problems
from agent.catalog.gpu_problems import EXPORTER_STALE, HELD, LOST, UNSEEN
from agent.catalog.reasons import INTERNAL
from agent.sources.nvml import library


def test_every_problem_of_a_source_is_in_a_group() -> None:
    declared = {value for value in vars(gpu_problems).values() if isinstance(value, str)}
    problems = {text for text in declared if re.fullmatch("[a-z]+(_[a-z]+)+", text)}
    assert {*library.REASONS.values(), INTERNAL} | problems <= LOST | HELD | set(UNSEEN)


def test_no_problem_is_in_two_groups() -> None:
    ways = (LOST, HELD, frozenset(UNSEEN))
    assert not any(one & other for one, other in combinations(ways, 2))


def test_a_stale_exporter_and_an_error_of_the_agent_are_no_lost_gpu() -> None:
    assert {EXPORTER_STALE, INTERNAL} <= set(UNSEEN)
