"""Folding the changes of commits into rollups of a bounded number of series."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, func, select, text

from agent.errors import StoreUnavailable
from agent.records.objective import JudgedRequest
from agent.records.queries import Selection, Window
from agent.store import folding, rollup_queries
from agent.store.connection import for_writing
from agent.store.folding import RollupStore, rebuild_rollups
from agent.store.rollups import NO_COUNTS, SUMMED_WIDTHS_S, WIDTHS_S, add_to_rollups
from agent.store.store_queries import StoreQueries
from agent.store.tables import publishing, rollup_changes, rollup_series, rollups
from tests.store.making import (
    NOON,
    counted_rollups,
    counted_rows,
    fold,
    request,
    rollup_bytes,
    some,
    store,
)
from tests.store.test_joining import break_at
from tests.store.test_retention import commits_of
from tests.store.test_rollups import SEEN, _empty, on_a_database
from tests.store.views import JoiningAgent, cut, engine_view, proxy_view

DAY_S = 86400
TODAY = NOON // DAY_S * DAY_S
ALL_DAY = Window(from_s=TODAY, until=TODAY + DAY_S)
LAST = select(publishing.c.last)


def rows_in(engine: Engine, table: Any) -> int:
    with engine.connect() as connection:
        return int(connection.execute(select(func.count()).select_from(table)).scalar_one())


def rebuild(engine: Engine, agent: str = "agent-0", days: int = 1) -> None:
    with for_writing(engine).begin() as connection:
        rebuild_rollups(connection, agent, TODAY - (days - 1) * DAY_S, TODAY + DAY_S)


VIEWS = st.lists(
    st.tuples(st.sampled_from([proxy_view, engine_view]), st.integers(1, 4), st.integers(0, 3)),
    max_size=10,
    unique=True,
)


def _late(view: Callable[..., JudgedRequest], number: int, days: int) -> JudgedRequest:
    times = {"ended_at": NOON - days * DAY_S + number * 7.5, "input_tokens": 4**number * 100}
    return view(number, **times)


@on_a_database
@given(views=VIEWS, data=st.data())
def test_rollups_rebuilt_from_rows_have_the_same_bytes(
    sqlite: Engine, views: list[Any], data: st.DataObject
) -> None:
    """Also with rows that came late, were joined, are not yet counted, or were removed."""
    _empty(sqlite)
    agent = JoiningAgent(sqlite)
    late = [_late(*view) for view in views]
    for batch in cut(late, data.draw(st.lists(st.integers(0, len(late)), max_size=4))):
        agent.take(*batch)
        if data.draw(st.booleans()):
            fold(sqlite)
        if data.draw(st.booleans()):
            agent.settle(NOON + 100)
    grown = rollup_bytes(sqlite)
    rebuild(sqlite, days=5)
    assert rollup_bytes(sqlite) == grown
    assert counted_rollups(sqlite) == counted_rows(sqlite)


@on_a_database
@given(seen=st.lists(SEEN, max_size=10))
def test_each_agent_rebuilds_its_own_rollups(sqlite: Engine, seen: list[Any]) -> None:
    _empty(sqlite)
    store(sqlite, [request(n, judged, **facts) for n, (judged, facts) in enumerate(seen)])
    grown = rollup_bytes(sqlite)
    with sqlite.begin() as connection:
        connection.execute(text("DELETE FROM rollups"))
    for agent in ("agent-0", "agent-1", ""):
        rebuild(sqlite, agent)
    assert rollup_bytes(sqlite) == grown


def test_only_whole_days_are_rebuilt(sqlite: Engine) -> None:
    with sqlite.begin() as connection, pytest.raises(ValueError, match="no whole days of UTC"):
        rebuild_rollups(connection, "agent-0", TODAY, TODAY + 3600)


def _subtract_all(engine: Engine) -> None:
    with for_writing(engine).begin() as connection:
        add_to_rollups(connection, [], [request(1, ttft_s=0.5)])
    fold(engine)


def _rebuild_without_rows(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM requests"))
    rebuild(engine)


@pytest.mark.parametrize("empty", [_subtract_all, _rebuild_without_rows])
def test_a_rollup_whose_requests_are_gone_stays_as_zeros_to_be_published(
    sqlite: Engine, empty: Callable[[Engine], None]
) -> None:
    store(sqlite, [request(1, ttft_s=0.5)])
    fold(sqlite)
    with sqlite.connect() as connection:
        published, stored = connection.scalar(LAST), connection.execute(select(rollups)).all()
    empty(sqlite)
    with sqlite.connect() as connection:
        left = connection.execute(select(rollups)).mappings().all()
    assert len(left) == len(stored) == len(WIDTHS_S) + len(SUMMED_WIDTHS_S)
    assert {(row["counts"], row["ttft_s"]) for row in left} == {(NO_COUNTS, None)}
    assert all(row["changed"] > published for row in left)
    assert rollup_bytes(sqlite) == {}
    assert StoreQueries(sqlite).tallies_by("model", ALL_DAY, Selection()) == {}


def test_folding_again_changes_nothing(sqlite: Engine) -> None:
    store(sqlite, some(range(5)))
    assert fold(sqlite) == 1
    before = rollup_bytes(sqlite)
    assert fold(sqlite) == 0
    assert rollup_bytes(sqlite) == before


def test_many_changes_are_folded_in_slices_so_that_the_writer_can_commit_between(
    sqlite: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding, "CHANGES_PER_SLICE", 4)
    for number in range(8):
        store(sqlite, [request(number)])
    given_way: list[int] = []
    with commits_of(sqlite) as commits:
        rollups = RollupStore(sqlite, "agent-0", give_way=lambda: given_way.append(len(commits)))
        assert rollups.fold() == 8
    # Two full slices, and one that finds no more.
    assert len(commits) == 3
    # The fold gives way to the writer before each slice.
    assert given_way == [0, 1, 2]
    assert counted_rollups(sqlite) == counted_rows(sqlite)


def test_a_fold_that_fails_at_any_statement_is_done_by_the_next(sqlite: Engine) -> None:
    queries = StoreQueries(sqlite)
    store(sqlite, [request(n, ended_at=NOON + 20 * n) for n in range(5)])
    fold(sqlite)
    store(sqlite, [request(n, ended_at=NOON + 20 * n) for n in range(3, 9)])
    window = Window(from_s=NOON, until=NOON + 300)
    for broken in count():
        repair = break_at(sqlite, broken)
        try:
            fold(sqlite)
        except StoreUnavailable:
            pass
        else:
            break
        finally:
            repair()
        assert queries.tally(window, Selection()).requests == 9
    assert broken >= 5
    assert counted_rollups(sqlite) == counted_rows(sqlite)


def test_changes_of_all_names_that_an_agent_had_are_folded(sqlite: Engine) -> None:
    store(sqlite, [request(1, agent="before"), request(2, agent=None), request(3)])
    assert RollupStore(sqlite, "agent-0").fold() == 3
    assert rows_in(sqlite, rollup_changes) == 0
    assert counted_rollups(sqlite) == counted_rows(sqlite)


def test_a_series_is_stored_once(sqlite: Engine) -> None:
    store(sqlite, some(range(3)))
    fold(sqlite)
    store(sqlite, some(range(3, 6), ended_at=NOON + 3600))
    fold(sqlite)
    # One of unknown input length, and one of all lengths.
    assert rows_in(sqlite, rollup_series) == 2


MOST = 8
TODAY_UNTIL_NOW = Window(from_s=int(NOON) // 86400 * 86400, until=NOON + 3600, ends_now=True)


def named(names: Sequence[str], first: int = 0) -> list[JudgedRequest]:
    return [request(first + n, model=name) for n, name in enumerate(names)]


def names(first: int, count: int) -> list[str]:
    return [f"invented-{number}" for number in range(first, first + count)]


def fold_to_most(sqlite: Engine) -> int:
    """Fold, and return how many requests were put into series of `other`."""
    replaced: list[int] = []
    RollupStore(sqlite, "agent-0", MOST, replaced.append).fold()
    return sum(replaced)


def by_model(sqlite: Engine, **selection: str) -> dict[str | None, int]:
    chosen = Selection(**selection)
    tallies = StoreQueries(sqlite).tallies_by("model", TODAY_UNTIL_NOW, chosen)
    return {name: tally.requests for name, tally in tallies.items()}


def sizes(sqlite: Engine) -> tuple[int, int]:
    with sqlite.connect() as connection:
        counts = (select(func.count()).select_from(table) for table in (rollup_series, rollups))
        series, held = (connection.execute(count).scalar_one() for count in counts)
    return series, held


def test_beyond_the_bound_new_models_are_other_and_nothing_is_lost(sqlite: Engine) -> None:
    grown: list[tuple[int, int]] = []
    store(sqlite, named(["llama"] * 3))
    fold_to_most(sqlite)
    for attack in range(3):
        store(sqlite, named(names(100 * attack, 100), first=1000 * (attack + 1)))
        assert fold_to_most(sqlite) == (100 if attack else 100 - (MOST - 1))
        grown.append(sizes(sqlite))
    found = by_model(sqlite)
    assert len(found) == MOST + 1
    assert grown == [grown[0]] * 3
    assert found["llama"] == 3
    assert found["other"] == 300 - (MOST - 1)
    assert sum(found.values()) == 303
    # A model that is told apart goes on to be.
    store(sqlite, named(["llama"] * 2, first=9000))
    fold_to_most(sqlite)
    assert by_model(sqlite)["llama"] == 5
    assert by_model(sqlite, model="other") == {"other": 300 - (MOST - 1)}


def test_tenants_are_bounded_too_and_what_is_unknown_stays_unknown(sqlite: Engine) -> None:
    invented = [request(n, tenant=f"key-{n}", model=None) for n in range(30)]
    store(sqlite, invented)
    fold_to_most(sqlite)
    tallies = StoreQueries(sqlite).tallies_by("tenant", TODAY_UNTIL_NOW, Selection())
    assert tallies["other"].requests == 30 - MOST
    assert by_model(sqlite) == {None: 30}


def test_what_was_folded_as_other_is_subtracted_from_other(sqlite: Engine) -> None:
    """As a joined row that is counted anew; a rebuild counts all rows anew."""
    store(sqlite, named(names(0, 40)))
    fold_to_most(sqlite)
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
