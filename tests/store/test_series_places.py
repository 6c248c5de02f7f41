"""Senders choose names of models and tenants: rollups tell a bounded number of them apart."""

import logging
from collections import Counter
from collections.abc import Sequence

import pytest
from sqlalchemy import Engine, func, select

from agent.records.objective import JudgedRequest
from agent.records.queries import Selection, Window
from agent.store import rollup_queries
from agent.store.folding import RollupStore
from agent.store.store_queries import StoreQueries
from agent.store.tables import rollup_series, rollups
from tests.store.making import NOON, request, rollup_bytes, store

MOST = 8
OVER = Window(from_s=int(NOON) // 86400 * 86400, until=NOON + 3600, ends_now=True)


def named(names: Sequence[str], first: int = 0) -> list[JudgedRequest]:
    """One request of each of these models."""
    return [request(first + n, model=name) for n, name in enumerate(names)]


def names(first: int, count: int) -> list[str]:
    return [f"invented-{number}" for number in range(first, first + count)]


def fold(sqlite: Engine) -> None:
    fold_counting(sqlite)


def fold_counting(sqlite: Engine) -> int:
    """Fold, and return how many requests were put into series of `other`."""
    replaced: list[int] = []
    RollupStore(sqlite, "agent-0", MOST, replaced.append).fold()
    return sum(replaced)


def by_model(sqlite: Engine, **selection: str) -> dict[str | None, int]:
    chosen = Selection(**selection)
    tallies = StoreQueries(sqlite).tallies_by("model", OVER, chosen)
    return {name: tally.requests for name, tally in tallies.items()}


def sizes(sqlite: Engine) -> tuple[int, int]:
    """How many series and rollups there are."""
    with sqlite.connect() as connection:
        counts = (select(func.count()).select_from(table) for table in (rollup_series, rollups))
        series, held = (connection.execute(count).scalar_one() for count in counts)
    return series, held


def test_beyond_the_bound_new_models_are_other_and_nothing_is_lost(sqlite: Engine) -> None:
    store(sqlite, named(["llama"] * 3))
    fold(sqlite)
    for attack in range(3):
        store(sqlite, named(names(100 * attack, 100), first=1000 * (attack + 1)))
        assert fold_counting(sqlite) == (100 if attack else 100 - (MOST - 1))
    found = by_model(sqlite)
    assert len(found) == MOST + 1
    assert found["llama"] == 3
    assert found["other"] == 300 - (MOST - 1)
    assert sum(found.values()) == 303
    # A model that is told apart goes on to be.
    store(sqlite, named(["llama"] * 2, first=9000))
    fold(sqlite)
    assert by_model(sqlite)["llama"] == 5
    assert by_model(sqlite, model="other") == {"other": 300 - (MOST - 1)}


def test_the_size_of_rollups_does_not_grow_with_the_names(sqlite: Engine) -> None:
    store(sqlite, named(names(0, 50)))
    fold(sqlite)
    before = sizes(sqlite)
    store(sqlite, named(names(50, 200), first=50))
    fold(sqlite)
    assert sizes(sqlite) == before


def test_tenants_are_bounded_too_and_what_is_unknown_stays_unknown(sqlite: Engine) -> None:
    invented = [request(n, tenant=f"key-{n}", model=None) for n in range(30)]
    store(sqlite, invented)
    fold(sqlite)
    tallies = StoreQueries(sqlite).tallies_by("tenant", OVER, Selection())
    assert tallies["other"].requests == 30 - MOST
    assert by_model(sqlite) == {None: 30}


def test_what_was_folded_as_other_is_subtracted_from_other(sqlite: Engine) -> None:
    """As a joined row that is counted anew; a rebuild counts all rows anew."""
    store(sqlite, named(names(0, 40)))
    fold(sqlite)
    grown = rollup_bytes(sqlite)
    day = int(NOON) // 86400 * 86400
    RollupStore(sqlite, "agent-0", MOST).rebuild(day, day + 86400)
    assert rollup_bytes(sqlite) == grown


def test_changes_that_are_not_folded_yet_make_no_more_groups_than_series(
    sqlite: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollup_queries, "MAX_SERIES", MOST)
    store(sqlite, named(names(0, 40)))
    found = by_model(sqlite)
    assert len(found) == MOST + 1
    assert Counter(found)["other"] == 40 - MOST


def test_a_full_table_of_series_is_logged_once(
    sqlite: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    # It is logged once a process.
    agent = "agent of many models"
    with caplog.at_level(logging.WARNING):
        for first in (0, 50, 100):
            invented = range(first, first + 50)
            store(sqlite, [request(n, agent=agent, model=f"m-{n}") for n in invented])
            RollupStore(sqlite, agent, MOST).fold()
    assert caplog.text.count("storage.max_series") == 1
