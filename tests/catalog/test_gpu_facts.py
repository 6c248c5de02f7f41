"""Rules for the facts of GPUs, and their reference in the documentation."""

import re
from pathlib import Path

from agent.catalog import gpu_facts
from agent.catalog.engine_facts import ENGINE_FACTS
from agent.catalog.gpu_facts import GPU_FACTS
from agent.catalog.gpu_problems import COUNTED_XIDS, XIDS, XidGrade
from agent.catalog.metric import Kind, Merge, Metric, Unit

REFERENCE = Path(__file__).parents[2] / "docs/gpus.md"

# The last words of names that carry a unit.
UNITS = {"bytes", "seconds", "ratio", "watts", "joules", "hertz", "celsius"}


def test_every_declared_fact_is_listed_once() -> None:
    declared = [value for value in vars(gpu_facts).values() if isinstance(value, Metric)]
    assert sorted(fact.name for fact in GPU_FACTS) == sorted(fact.name for fact in declared)
    assert len({fact.name for fact in (*GPU_FACTS, *ENGINE_FACTS)}) == len(
        (*GPU_FACTS, *ENGINE_FACTS)
    )


def test_a_fact_is_named_for_the_gpu_and_its_base_unit() -> None:
    for fact in GPU_FACTS:
        assert re.fullmatch(r"gpu(_[a-z]+)+", fact.name)
        assert fact.name.endswith(fact.unit.value)
        assert not fact.name.endswith("_total")
        for unit in set(Unit) - {Unit.NONE, fact.unit}:
            assert not fact.name.endswith(unit.value)


def test_no_name_has_a_unit_that_is_no_base_unit() -> None:
    for fact in GPU_FACTS:
        other = {
            "ms",
            "milliseconds",
            "percent",
            "mib",
            "megabytes",
            "milliwatts",
            "mhz",
            "megahertz",
        }
        assert not other & set(fact.name.split("_"))
        assert not UNITS & set(fact.name.split("_")[:-1])


def test_help_is_a_sentence() -> None:
    for fact in GPU_FACTS:
        assert re.fullmatch(r"[A-Z0-9].*[^.]\.", fact.help)


def test_a_fact_has_no_label_for_the_gpu() -> None:
    for fact in GPU_FACTS:
        assert not {"gpu", "uuid", "index", "le"} & set(fact.labels)


def test_values_of_several_agents_for_one_gpu_are_not_summed() -> None:
    for fact in GPU_FACTS:
        assert fact.merge is Merge.MAX
        assert fact.kind is not Kind.HISTOGRAM


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
