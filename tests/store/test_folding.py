"""Folding the changes of commits into rollups."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, event, func, select, text

from agent.app.jobs import Jobs
from agent.errors import StoreUnavailable
from agent.records.objective import JudgedRequest
from agent.records.queries import Selection, Window
from agent.store import folding, rollup_store
from agent.store.connection import ABANDONED_AFTER_S, for_writing, open_engine
from agent.store.folding import rebuild_rollups
from agent.store.rollup_store import RollupStore
from agent.store.store_queries import StoreQueries
from agent.store.tables import rollup_changes, rollup_series, rollups
from tests.store.making import (
    NOON,
    WITHIN_S,
    counted_rollups,
    counted_rows,
    fold,
    request,
    rollup_bytes,
    some,
    store,
)
from tests.store.test_retention import commits_of
from tests.store.test_rollups import SEEN, _empty, on_a_database
from tests.store.views import JoiningAgent, cut, engine_view, proxy_view

DAY_S = 86400
TODAY = NOON // DAY_S * DAY_S


def rows_in(engine: Engine, table: Any) -> int:
    """How many rows a table has."""
    with engine.connect() as connection:
        return int(connection.execute(select(func.count()).select_from(table)).scalar_one())


def rebuild(engine: Engine, agent: str = "agent-0", days: int = 1) -> None:
    """Rebuild the rollups up to the end of today."""
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
    database: Engine, views: list[Any], data: st.DataObject
) -> None:
    """Also with rows that came late, were joined, are not yet counted, or were removed."""
    _empty(database)
    agent = JoiningAgent(database)
    late = [_late(*view) for view in views]
    for batch in cut(late, data.draw(st.lists(st.integers(0, len(late)), max_size=4))):
        agent.take(*batch)
        if data.draw(st.booleans()):
            fold(database)
        if data.draw(st.booleans()):
            agent.settle(NOON + 100)
    grown = rollup_bytes(database)
    rebuild(database, days=5)
    assert rollup_bytes(database) == grown
    assert counted_rollups(database) == counted_rows(database)


@on_a_database
@given(seen=st.lists(SEEN, max_size=10))
def test_each_agent_rebuilds_its_own_rollups(database: Engine, seen: list[Any]) -> None:
    _empty(database)
    store(database, [request(n, judged, **facts) for n, (judged, facts) in enumerate(seen)])
    grown = rollup_bytes(database)
    with database.begin() as connection:
        connection.execute(text("DELETE FROM rollups"))
    for agent in ("agent-0", "agent-1", ""):
        rebuild(database, agent)
    assert rollup_bytes(database) == grown


def test_only_whole_days_are_rebuilt(database: Engine) -> None:
    with database.begin() as connection, pytest.raises(ValueError, match="no whole days of UTC"):
        rebuild_rollups(connection, "agent-0", TODAY, TODAY + 3600)


def test_changes_left_by_a_stopped_agent_are_folded_later(
    database: Engine, queries: StoreQueries
) -> None:
    store(database, [request(n, ended_at=NOON - 600 * n) for n in range(50)])
    assert rows_in(database, rollups) == 0
    assert RollupStore(database, "agent-0").fold(NOON + 6 * 3600) == 50
    assert rows_in(database, rollup_changes) == 0
    assert counted_rollups(database) == counted_rows(database)


def test_folding_again_changes_nothing(database: Engine) -> None:
    store(database, some(range(5)))
    assert fold(database) == 1
    before = rollup_bytes(database)
    assert fold(database) == 0
    assert rollup_bytes(database) == before


def test_many_changes_are_folded_in_slices_so_that_the_writer_can_commit_between(
    database: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding, "CHANGES_PER_SLICE", 4)
    monkeypatch.setattr(rollup_store, "CHANGES_PER_SLICE", 4)
    for number in range(8):
        store(database, [request(number)])
    given_way: list[int] = []
    with commits_of(database) as commits:
        rollups = RollupStore(database, "agent-0", give_way=lambda: given_way.append(len(commits)))
        assert rollups.fold(NOON) == 8
    # The query for agents with changes, two full slices, and one that finds no more.
    assert len(commits) == 4
    # The fold gives way to the writer before each slice.
    assert given_way == [1, 2, 3]
    assert counted_rollups(database) == counted_rows(database)


class Broken(Exception):
    """The process ends here."""


def test_a_fold_that_fails_at_any_statement_is_done_by_the_next(
    database: Engine, queries: StoreQueries
) -> None:
    store(database, [request(n, ended_at=NOON + 20 * n) for n in range(5)])
    fold(database)
    store(database, [request(n, ended_at=NOON + 20 * n) for n in range(3, 9)])
    window = Window(from_s=NOON, until=NOON + 300)
    for place in range(100):
        left = [place]

        def fail(*_arguments: object, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Broken

        event.listen(database, "before_cursor_execute", fail)
        try:
            RollupStore(database, "agent-0").fold(NOON)
        except Broken:
            pass
        else:
            break
        finally:
            event.remove(database, "before_cursor_execute", fail)
        assert queries.tally(window, Selection()).requests == 9
    assert place >= 5
    assert counted_rollups(database) == counted_rows(database)


def test_the_scheduled_job_folds_changes_that_failed_runs_left(
    database: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is unreachable for some runs, and the scheduler keeps the job."""
    store(database, [request(n, ended_at=NOON - 3600 * n) for n in range(30)])
    rollup_store = RollupStore(database, "agent-0")
    runs, done = iter(range(3)), threading.Event()

    def job(now: float) -> None:
        if next(runs, None) is not None:
            raise StoreUnavailable("unreachable")
        rollup_store.fold(now)
        done.set()

    jobs = Jobs(time.time)
    jobs.every(0.01, "fold rollups", job, at_once=True)
    jobs.start()
    assert done.wait(WITHIN_S)
    jobs._scheduler.shutdown()
    assert rows_in(database, rollup_changes) == 0
    assert counted_rollups(database) == counted_rows(database)


def test_another_agents_changes_are_folded_only_after_it_is_abandoned(database: Engine) -> None:
    store(database, [request(1, agent="agent-1"), request(2, agent=None)])
    rollup_store = RollupStore(database, "agent-0")
    assert rollup_store.fold(NOON + ABANDONED_AFTER_S) == 1
    assert rollup_store.fold(NOON + ABANDONED_AFTER_S + 1) == 1
    assert counted_rollups(database) == counted_rows(database)


def test_agents_of_one_name_that_fold_at_once_count_each_change_once(
    database_url: str, database: Engine
) -> None:
    opened = [open_engine(database_url) for _ in range(3)]
    barrier = threading.Barrier(len(opened))
    failures: list[Exception] = []

    def work(engine: Engine, numbers: Sequence[int]) -> None:
        try:
            barrier.wait()
            for number in numbers:
                store(engine, [request(number, ended_at=NOON + number)])
                RollupStore(engine, "agent-0").fold(NOON)
        except Exception as error:
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=(engine, range(20 * n, 20 * n + 20)))
        for n, engine in enumerate(opened)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for engine in opened:
        engine.dispose()
    assert failures == []
    assert counted_rollups(database) == counted_rows(database)


def test_a_series_is_stored_once(database: Engine) -> None:
    store(database, some(range(3)))
    fold(database)
    store(database, some(range(3, 6), ended_at=NOON + 3600))
    fold(database)
    # One of unknown input length, and one of all lengths.
    assert rows_in(database, rollup_series) == 2
