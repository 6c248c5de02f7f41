"""PostgreSQL's days: made ahead, dropped whole, and no row is lost or stored twice for them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest
from sqlalchemy import Engine, event, inspect, text

from agent.errors import StoreUnavailable
from agent.store.connection import open_engine
from agent.store.observations import ObservationStore
from agent.store.retention import DAYS_AHEAD, PARTITIONED, Retention, keep_partitions
from tests.store.making import (
    NOON,
    WITHIN_S,
    gpu_sample,
    keys_of,
    publish,
    request,
    some,
    store_in,
    stored_keys,
)
from tests.store.migrated import migrated

DAY_S = 86400.0


def day(at: float) -> str:
    """The end of the name of the partition of a time."""
    return f"{datetime.fromtimestamp(at, UTC):%Y%m%d}"


def rows_by_partition(engine: Engine, table: str = "requests") -> dict[str, int]:
    """How many rows the partitions of a table have that have any."""
    counted = text(f"SELECT tableoid::regclass::text, count(*) FROM {table} GROUP BY 1")
    with engine.connect() as connection:
        return {name.removeprefix(f"{table}_"): rows for name, rows in connection.execute(counted)}


def days_of(engine: Engine, table: str) -> list[str]:
    """The days of a table that have a partition."""
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
        while not stop.is_set() or len(written) < 20:
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
