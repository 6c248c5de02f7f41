"""What expires: rows, rollups, and the days of PostgreSQL, which are dropped whole."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
from sqlalchemy import Engine, event, func, inspect, select, text

from agent.errors import StoreUnavailable
from agent.records.objective import JudgedRequest
from agent.store import retention
from agent.store.connection import open_engine
from agent.store.objectives import ObjectiveStore
from agent.store.observations import ObservationStore
from agent.store.retention import DAYS_AHEAD, PARTITIONED, Retention, keep_partitions
from agent.store.rollups import KEEP_S
from agent.store.store_queries import StoreQueries
from agent.store.tables import metadata
from tests.records.making import objective
from tests.store.making import (
    NOON,
    WITHIN_S,
    counted_rollups,
    counted_rows,
    engine_sample,
    fold,
    gpu_sample,
    keys_of,
    publish,
    request,
    restart,
    rollup_bytes,
    some,
    store,
    store_in,
    stored_keys,
)
from tests.store.migrated import migrated
from tests.store.views import DUE, JoiningAgent, engine_view, proxy_view

DAY_S = 86400


def counts(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        return {
            table.name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in metadata.sorted_tables
        }


def store_folded(engine: Engine, judged: Sequence[JudgedRequest]) -> None:
    def write(file: Engine) -> None:
        store(file, judged)
        fold(file)

    publish(engine, write)


@contextmanager
def commits_of(engine: Engine) -> Iterator[list[str]]:
    seen: list[str] = []

    def listen(_connection: object) -> None:
        seen.append("commit")

    event.listen(engine, "commit", listen)
    yield seen
    event.remove(engine, "commit", listen)


def test_old_rows_expire_and_young_ones_stay(database: Engine) -> None:
    limit = NOON - 7 * DAY_S
    times = (limit - 1000, limit - 1e-6, limit, limit + 1e-6, NOON)
    store_in(database, [request(n, started_at=at) for n, at in enumerate(times)])
    for at in times:
        ObservationStore(database, "agent-0").write_engine_sample(engine_sample(at))
    ObservationStore(database, "agent-0").write_gpu_samples([gpu_sample(at) for at in times])
    deleted = Retention(database).expire(
        requests_before=limit, rollups_before=limit - 1e9, now=NOON
    )
    assert deleted == 6
    assert stored_keys(database) == keys_of(some([2, 3, 4]))
    assert counts(database)["engine_samples"] == counts(database)["gpu_samples"] == 3


def test_nothing_else_expires(sqlite: Engine) -> None:
    objectives = ObjectiveStore(sqlite, "agent-0")
    objectives.write_in_force([objective("chat")], NOON - 500 * DAY_S)
    objectives.write_in_force([objective("chat", ttft_s=1.0)], NOON - 450 * DAY_S)
    store_in(sqlite, some(range(3), started_at=NOON, ended_at=NOON))
    ObservationStore(sqlite, "agent-0").write_engine_sample(engine_sample(NOON))
    ObservationStore(sqlite, "agent-0").write_gpu_samples([gpu_sample(NOON)])
    ObservationStore(sqlite, "agent-0").write_event(restart(NOON))
    before = counts(sqlite)
    assert Retention(sqlite).expire(NOON, NOON, NOON) == 0
    assert counts(sqlite) == before


def test_many_old_rows_are_deleted_in_slices_so_that_the_writer_can_commit_between(
    database: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "ROWS_PER_SLICE", 3)
    store_folded(database, [*some(range(9), started_at=NOON - 2 * DAY_S), *some([100])])
    with commits_of(database) as commits:
        assert Retention(database).expire(NOON - DAY_S, 0, NOON + 60) == 9
    # Three full slices and one that finds no more; one for each other table or width of rollups
    # and of counts; series; agents. Of each partitioned table, two for its partitions.
    by_day = 3 * 2 if database.dialect.name == "postgresql" else 0
    assert len(commits) == 4 + 4 + 2 * 4 + 3 + 2 + 1 + by_day
    assert stored_keys(database) == keys_of(some([100]))


def test_rollups_outlive_the_rows_that_they_count(sqlite: Engine) -> None:
    store_in(sqlite, some(range(3)))
    before = rollup_bytes(sqlite)
    Retention(sqlite).expire(
        requests_before=NOON + DAY_S, rollups_before=NOON - 400 * DAY_S, now=NOON + 60
    )
    assert counted_rows(sqlite) == {}
    assert rollup_bytes(sqlite) == before


def test_narrower_rollups_expire_sooner(database: Engine) -> None:
    retention_s = {**KEEP_S, DAY_S: 400 * DAY_S}
    starts = {
        width_s: [
            (NOON - age_s) // width_s * width_s
            for age_s in (0, width_retention_s, width_retention_s + 2 * width_s)
        ]
        for width_s, width_retention_s in retention_s.items()
    }
    times = sorted({start for each in starts.values() for start in each})
    store_folded(database, [request(n, ended_at=start) for n, start in enumerate(times)])
    Retention(database).expire(0, rollups_before=NOON - 400 * DAY_S, now=NOON)
    left = {key[:2] for key in rollup_bytes(database)}
    for width_s, (newest, oldest, too_old) in starts.items():
        assert {(width_s, newest), (width_s, oldest)} <= left
        assert (width_s, too_old) not in left
        assert all(
            start > NOON - retention_s[width_s] - width_s for w, start in left if w == width_s
        )
    assert len(stored_keys(database)) == len(times)


def test_rollups_of_many_series_are_deleted_in_slices(
    sqlite: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(sqlite, [request(n, model=f"model-{n}", ended_at=NOON - DAY_S) for n in range(5)])
    fold(sqlite)
    monkeypatch.setattr(retention, "_SERIES_PER_SLICE", 2)
    with commits_of(sqlite) as in_slices:
        Retention(sqlite).expire(0, 0, NOON)
    assert 10 not in {width_s for width_s, *_ in rollup_bytes(sqlite)}
    monkeypatch.setattr(retention, "_SERIES_PER_SLICE", 1000)
    with commits_of(sqlite) as at_once:
        Retention(sqlite).expire(0, 0, NOON)
    # Of both tables, in four widths.
    more_slices = -(-counts(sqlite)["rollup_series"] // 2) - 1
    assert len(in_slices) - len(at_once) == 2 * 4 * more_slices > 0


def test_no_rollup_is_older_than_the_configured_retention(sqlite: Engine) -> None:
    store_folded(sqlite, [request(n, ended_at=NOON - n * 600) for n in range(20)])
    Retention(sqlite).expire(0, rollups_before=NOON - 3600, now=NOON)
    ends = {start + width_s for width_s, start, *_ in rollup_bytes(sqlite)}
    assert min(ends) > NOON - 3600


def test_a_series_is_deleted_with_its_last_rollup(database: Engine) -> None:
    store_folded(database, [request(1, model="old", ended_at=NOON - 401 * DAY_S), request(2)])
    assert Retention(database).expire(0, NOON - 400 * DAY_S, NOON) == 6 + 2
    assert counts(database)["rollup_series"] == 2
    store_in(database, [request(3, model="old")])
    assert counted_rollups(database)[60, NOON, "agent-0", "chat-0", "old", "", "", '["chat"]']


def test_changes_that_are_not_folded_yet_never_expire(sqlite: Engine) -> None:
    store(sqlite, some(range(3)))
    Retention(sqlite).expire(NOON + 1e6, NOON + 1e6, NOON + 1e6)
    assert counts(sqlite)["rollup_changes"] == 1


@pytest.mark.parametrize("width_s", KEEP_S)
def test_rollups_of_the_longest_window_on_a_grid_are_kept(sqlite: Engine, width_s: int) -> None:
    """Also when the query comes late, and the first rollup starts before the window."""
    longest_s = max(
        length_s
        for length_s in range(0, 500 * DAY_S, 21_600)
        if StoreQueries(sqlite).grid_s(length_s) == width_s
    )
    start = (NOON - longest_s) // width_s * width_s
    store_folded(sqlite, [request(1, ended_at=start)])
    Retention(sqlite).expire(0, 0, NOON + 3600)
    assert (width_s, start) in {key[:2] for key in rollup_bytes(sqlite)}


def test_events_are_kept_as_long_as_rollups(database: Engine) -> None:
    for at in (NOON - 400 * DAY_S - 1, NOON - 399 * DAY_S, NOON):
        ObservationStore(database, "agent-0").write_event(restart(at))
    assert Retention(database).expire(NOON, NOON - 400 * DAY_S, NOON) == 1
    assert counts(database)["events"] == 2


def test_moved_requests_are_remembered_as_long_as_requests_are_kept(sqlite: Engine) -> None:
    """A shared database may still have them where they were."""
    agent = JoiningAgent(sqlite)
    agent.take(engine_view(1))
    agent.settle(DUE)
    agent.take(proxy_view(1))
    assert counts(sqlite)["deleted_requests"] == 1
    began_at = engine_view(1).record.started_at
    assert Retention(sqlite).expire(began_at, 0, NOON) == 1
    assert counts(sqlite)["deleted_requests"] == 1
    assert Retention(sqlite).expire(began_at + 1, 0, NOON) == 1
    assert counts(sqlite)["deleted_requests"] == 0


def day(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y%m%d}"


def rows_by_partition(engine: Engine, table: str = "requests") -> dict[str, int]:
    counted = text(f"SELECT tableoid::regclass::text, count(*) FROM {table} GROUP BY 1")
    with engine.connect() as connection:
        return {name.removeprefix(f"{table}_"): rows for name, rows in connection.execute(counted)}


def days_of(engine: Engine, table: str) -> list[str]:
    found = inspect(engine).get_table_names()
    names = (name.removeprefix(f"{table}_") for name in found if name.startswith(f"{table}_"))
    return sorted(name for name in names if name.isdecimal())


@pytest.mark.parametrize("table", PARTITIONED)
def test_the_next_days_have_partitions_before_their_rows_come(postgres: Engine, table: str) -> None:
    keep_partitions(postgres, 0, NOON)
    there = days_of(postgres, table)
    assert {day(NOON + ahead * DAY_S) for ahead in range(DAYS_AHEAD + 1)} <= set(there)
    keep_partitions(postgres, 0, NOON + DAY_S)
    assert set(days_of(postgres, table)) - set(there) == {day(NOON + (DAYS_AHEAD + 1) * DAY_S)}


def test_a_row_of_a_day_without_a_partition_waits_for_it_among_those_of_other_days(
    postgres: Engine,
) -> None:
    store_in(
        postgres, [request(1), request(2, started_at=NOON + DAY_S), request(3, started_at=9.0)]
    )
    assert rows_by_partition(postgres) == {"other_days": 3}
    keep_partitions(postgres, 0, NOON)
    assert rows_by_partition(postgres) == {
        day(NOON): 1,
        day(NOON + DAY_S): 1,
        "other_days": 1,
    }
    assert stored_keys(postgres) == keys_of(some([1, 2, 3]))


def test_a_day_is_dropped_when_all_its_rows_are_old(postgres: Engine) -> None:
    keep_partitions(postgres, 0, NOON - DAY_S)
    midnight = NOON - NOON % DAY_S
    times = (midnight - 1, midnight - 1e-6, midnight, NOON)
    store_in(postgres, [request(number, started_at=at) for number, at in enumerate(times)])
    samples = [gpu_sample(at) for at in times]
    publish(postgres, lambda file: ObservationStore(file, "agent-0").write_gpu_samples(samples))
    Retention(postgres).expire(midnight - 0.5, 0, NOON)
    assert rows_by_partition(postgres) == {day(NOON - DAY_S): 2, day(NOON): 2}
    Retention(postgres).expire(midnight, 0, NOON)
    assert rows_by_partition(postgres) == {day(NOON): 2}
    assert rows_by_partition(postgres, "gpu_samples") == {day(NOON): 2}
    assert day(NOON - DAY_S) not in days_of(postgres, "requests")


def test_agents_that_keep_partitions_at_once_make_and_drop_each_once(postgres: Engine) -> None:
    keep_partitions(postgres, 0, NOON - 9 * DAY_S)
    store_in(postgres, [request(1, started_at=NOON - 8 * DAY_S), request(2)])
    with ThreadPoolExecutor(10) as agents:
        list(agents.map(lambda _: keep_partitions(postgres, NOON - DAY_S, NOON), range(10)))
    assert rows_by_partition(postgres) == {day(NOON): 1}


def test_an_agent_at_work_on_one_table_keeps_no_other_from_the_rest(postgres: Engine) -> None:
    keep_partitions(postgres, 0, NOON - 9 * DAY_S)
    store_in(postgres, [request(1, started_at=NOON - 8 * DAY_S), request(2)])
    busy, resume = threading.Event(), threading.Event()
    other = open_engine(postgres.url.render_as_string(hide_password=False))

    @event.listens_for(other, "before_cursor_execute")
    def pause(*given: object) -> None:
        if "LOCK TABLE engine_samples" in str(given[2]):
            busy.set()
            resume.wait(WITHIN_S)

    with ThreadPoolExecutor(1) as agents:
        working = agents.submit(keep_partitions, other, 0, NOON)
        try:
            assert busy.wait(WITHIN_S)
            keep_partitions(postgres, NOON - DAY_S, NOON)
            assert rows_by_partition(postgres) == {day(NOON): 1}
        finally:
            resume.set()
        working.result()
    other.dispose()


def test_a_long_query_postpones_the_drop_and_no_writer_waits_for_it(postgres: Engine) -> None:
    keep_partitions(postgres, 0, NOON - 2 * DAY_S)
    store_in(postgres, [request(1, started_at=NOON - 2 * DAY_S)])
    with postgres.connect() as reader:
        reader.execute(text("SELECT count(*) FROM requests")).scalar_one()
        # The statement has ended, and its transaction holds the tables.
        with pytest.raises(StoreUnavailable, match="lock timeout"):
            keep_partitions(postgres, NOON, NOON + DAY_S)
        store_in(postgres, [request(2)])
        assert rows_by_partition(postgres)[day(NOON)] == 1
    keep_partitions(postgres, NOON - DAY_S, NOON + DAY_S)
    assert stored_keys(postgres) == keys_of(some([2]))


def test_rows_are_written_while_their_partition_is_made(postgres: Engine) -> None:
    stop = threading.Event()
    written: list[int] = []

    def write() -> None:
        while not stop.is_set() or len(written) < 5:
            written.append(len(written))
            store_in(postgres, [request(written[-1])])

    with ThreadPoolExecutor(1) as writer:
        writing = writer.submit(write)
        try:
            keep_partitions(postgres, 0, NOON)
        finally:
            stop.set()
        writing.result()
    assert stored_keys(postgres) == keys_of(some(written))


def test_a_new_database_has_partitions_for_today_and_for_other_days(postgres_url: str) -> None:
    now = datetime.now(UTC).timestamp()
    with migrated(postgres_url) as database:
        store_in(database, [request(1, started_at=now), request(2, started_at=9.0)])
        assert rows_by_partition(database) == {day(now): 1, "other_days": 1}
