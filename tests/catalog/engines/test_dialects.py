"""Dialects: the series of each engine for each fact."""

import pytest

from agent.catalog.engine_facts import (
    DATA_PARALLEL_RANKS,
    ENGINE_FACTS,
    FACT_MISSING,
    SCRAPE_DURATION,
)
from agent.catalog.engines import DIALECTS, Dialect

every_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda d: d.engine)


def test_every_fact_has_a_spelling_in_some_engine() -> None:
    facts = {metric for dialect in DIALECTS.values() for metric in dialect.facts}
    # The source counts the ranks in the exposition, and the facts that are gone from it.
    assert facts == set(ENGINE_FACTS) - {DATA_PARALLEL_RANKS, FACT_MISSING, SCRAPE_DURATION}


def test_engines_share_no_prefix() -> None:
    prefixes = [prefix for dialect in DIALECTS.values() for prefix in dialect.prefixes]
    assert len(set(prefixes)) == len(prefixes)


@every_dialect
def test_no_two_facts_read_the_same_series(dialect: Dialect) -> None:
    keys = [
        (spelling.series, spelling.number_in, tuple(spelling.only.items()), spelling.also)
        for spellings in dialect.facts.values()
        for spelling in spellings
    ]
    assert len(set(keys)) == len(keys)


@every_dialect
def test_a_series_without_the_prefix_is_shared_or_told_apart_by_a_label(dialect: Dialect) -> None:
    for spellings in dialect.facts.values():
        for spelling in spellings:
            prefixed = spelling.series.startswith(dialect.prefixes[0])
            assert prefixed or spelling.shared or spelling.only
            assert not (prefixed and spelling.shared)
