import pytest

from agent.catalog.engine_facts import DATA_PARALLEL_RANKS, ENGINE_FACTS
from agent.catalog.engines import DIALECTS, Dialect
from agent.catalog.engines.dialect import PROCESS_FACTS

every_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda d: d.engine)


def test_the_engines_are_those_that_settings_name() -> None:
    assert list(DIALECTS) == ["vllm", "sglang", "tgi", "trtllm"]


def test_every_fact_is_told_by_some_engine() -> None:
    told = {metric for dialect in DIALECTS.values() for metric in dialect.facts}
    # This one is counted from the ranks on the page.
    assert told == set(ENGINE_FACTS) - {DATA_PARALLEL_RANKS}


def test_engines_share_no_prefix() -> None:
    prefixes = [prefix for dialect in DIALECTS.values() for prefix in dialect.prefixes]
    assert len(set(prefixes)) == len(prefixes)


@every_dialect
def test_a_fact_is_spelled_at_least_once_and_each_time_otherwise(dialect: Dialect) -> None:
    for spellings in dialect.facts.values():
        series = [spelling.series for spelling in spellings]
        assert series
        assert len(set(series)) == len(series)


@every_dialect
def test_labels_are_renamed_only_where_the_fact_has_them(dialect: Dialect) -> None:
    for metric, spellings in dialect.facts.items():
        for spelling in spellings:
            assert set(spelling.labels) <= set(metric.labels)


@every_dialect
def test_no_two_facts_are_told_by_the_same_numbers(dialect: Dialect) -> None:
    keys = [
        (spelling.series, spelling.number_in, tuple(spelling.only.items()))
        for spellings in dialect.facts.values()
        for spelling in spellings
    ]
    assert len(set(keys)) == len(keys)


@every_dialect
def test_its_rows_are_written_with_its_first_prefix(dialect: Dialect) -> None:
    shared = {spelling.series for told in PROCESS_FACTS.values() for spelling in told}
    others = {
        spelling.series
        for spellings in dialect.facts.values()
        for spelling in spellings
        if not spelling.series.startswith(dialect.prefixes[0])
    }
    assert others <= shared | {"http_requests_total"}
