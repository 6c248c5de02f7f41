"""Rules for the facts and problems of GPUs, and their reference in the documentation."""

import re
from itertools import combinations
from pathlib import Path

from agent.catalog import gpu_problems
from agent.catalog.gpu_facts import GPU_FACTS
from agent.catalog.gpu_problems import (
    EXPORTER_STALE,
    HELD,
    LOST,
    UNSEEN,
    XIDS,
    XidGrade,
)
from agent.catalog.metric import Kind, Metric
from agent.catalog.reasons import INTERNAL
from agent.sources.nvml import library

REFERENCE = Path(__file__).parents[2] / "docs/gpus.md"


def _row(fact: Metric) -> str:
    name = fact.name + ("_total" if fact.kind is Kind.COUNTER else "")
    labels = ", ".join(f"`{label}`" for label in fact.labels)
    return f"| `{name}` | {labels}{' ' if labels else ''}| {fact.help} |"


def test_the_reference_has_exactly_the_facts_in_order() -> None:
    table, _, _ = REFERENCE.read_text().partition("\nWhich to use")
    rows = [line for line in table.splitlines() if line.startswith("| `gpu_")]
    assert rows == [_row(fact) for fact in GPU_FACTS]


def test_faults_of_the_gpu_are_critical_and_those_of_programs_are_not() -> None:
    for hardware_fault in (48, 64, 74, 79, 95, 119, 120):
        assert XIDS[hardware_fault].grade is XidGrade.CRITICAL
    for program_fault in (13, 31, 43):
        assert XIDS[program_fault].grade is XidGrade.APPLICATION


def test_every_problem_of_a_source_is_in_a_group() -> None:
    declared = {value for value in vars(gpu_problems).values() if isinstance(value, str)}
    problems = {text for text in declared if re.fullmatch("[a-z]+(_[a-z]+)+", text)}
    assert {*library.REASONS.values(), INTERNAL} | problems <= LOST | HELD | set(UNSEEN)


def test_no_problem_is_in_two_groups() -> None:
    ways = (LOST, HELD, frozenset(UNSEEN))
    assert not any(one & other for one, other in combinations(ways, 2))
    # A stale exporter and an error of the agent are no lost GPU.
    assert {EXPORTER_STALE, INTERNAL} <= set(UNSEEN)
