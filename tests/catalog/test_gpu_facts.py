"""Rules for the facts of GPUs, and their reference in the documentation."""

from pathlib import Path

from agent.catalog.gpu_facts import GPU_FACTS
from agent.catalog.gpu_problems import COUNTED_XIDS, XIDS, XidGrade
from agent.catalog.metric import Kind, Metric

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


def test_faults_of_gpus_and_programs_are_counted_and_information_is_not() -> None:
    assert {48, 79, 95, 13, 31, 43} <= set(COUNTED_XIDS)
    assert not {45, 92, 154} & set(COUNTED_XIDS)
