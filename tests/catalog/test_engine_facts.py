"""Rules for the facts of engines."""

import re

from agent.catalog import engine_facts
from agent.catalog.engine_facts import ENGINE_FACTS
from agent.catalog.metric import Kind, Merge, Metric, Unit


def test_every_declared_fact_is_listed_once() -> None:
    declared = [value for value in vars(engine_facts).values() if isinstance(value, Metric)]
    assert sorted(fact.name for fact in ENGINE_FACTS) == sorted(fact.name for fact in declared)
    assert len({fact.name for fact in ENGINE_FACTS}) == len(ENGINE_FACTS)


def test_a_fact_is_named_for_the_engine_and_its_base_unit() -> None:
    for fact in ENGINE_FACTS:
        assert re.fullmatch(r"llm_engine(_[a-z]+)+", fact.name)
        assert fact.name.endswith(fact.unit.value)
        assert not fact.name.endswith("_total")
        for unit in set(Unit) - {Unit.NONE, fact.unit}:
            assert not fact.name.endswith(unit.value)


def test_help_is_a_sentence() -> None:
    for fact in ENGINE_FACTS:
        assert re.fullmatch(r"[A-Z0-9].*[^.]\.", fact.help)


def test_a_fact_has_no_label_for_engine_or_model() -> None:
    for fact in ENGINE_FACTS:
        assert not {"engine", "model", "le"} & set(fact.labels)


def test_ratios_are_never_summed_and_counters_always_are() -> None:
    for fact in ENGINE_FACTS:
        if fact.unit is Unit.RATIO:
            assert fact.merge is Merge.MAX
        if fact.kind is not Kind.GAUGE:
            assert fact.merge is Merge.SUM
