import random
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

from agent.catalog.definitions import Verdict
from agent.records.objective import JudgedRequest
from agent.store.connection import for_writing, open_engine
from agent.store.inserting import insert_new, key_of
from agent.store.transactions import request_write
from tests.real_parts.waiting import eventually
from tests.store.making import (
    NOON,
    WITHIN_S,
    counted_rollups,
    counted_rows,
    judgement,
    keys_of,
    only_row,
    open_writer,
    request,
    some,
    store,
    stored_keys,
)
from tests.store.views import proxy_view


def test_a_batch_sent_twice_is_stored_once_and_new_once(database: Engine) -> None:
    batch = some(range(5))
    assert keys_of(store(database, batch)) == keys_of(batch)
    assert store(database, batch) == []
    assert stored_keys(database) == keys_of(batch)


def test_of_a_batch_that_holds_old_and_new_the_new_are_returned(database: Engine) -> None:
    store(database, some([1, 4, 7]))
    assert keys_of(store(database, some(range(9)))) == keys_of(some([0, 2, 3, 5, 6, 8]))
    assert stored_keys(database) == keys_of(some(range(9)))


def test_a_span_twice_in_one_batch_is_stored_and_returned_once(
    database: Engine,
) -> None:
    batch = some([1, 2, 1, 3, 3, 3])
    assert keys_of(store(database, batch)) == keys_of(some([1, 2, 3]))
    assert stored_keys(database) == keys_of(some([1, 2, 3]))
    assert counted_rollups(database) == counted_rows(database)


@pytest.mark.parametrize("rows", [1, 24, 25, 26, 49, 50, 63])
def test_a_batch_of_any_size_is_stored_in_its_order(database: Engine, rows: int) -> None:
    batch = some(range(rows))
    assert keys_of(store(database, [*batch, batch[-1]])) == keys_of(batch)
    with database.connect() as connection:
        stored = connection.execute(text("SELECT trace_id, span_id FROM requests ORDER BY id"))
        assert [tuple(row) for row in stored] == [key_of(item) for item in batch]


@pytest.mark.parametrize("view", [request, proxy_view], ids=["engine", "proxy"])
def test_a_statement_inserts_many_rows(
    sqlite: Engine, view: Callable[[int], JudgedRequest]
) -> None:
    """After each, the writer waits for Python's lock where another thread computes."""
    ran: list[str] = []
    with for_writing(sqlite).begin() as connection:
        driver: Any = connection.connection.driver_connection
        driver.set_trace_callback(ran.append)
        insert_new(connection, [view(number) for number in range(250)])
        driver.set_trace_callback(None)
    assert len([each for each in ran if each.startswith("INSERT INTO requests")]) == 10


def test_the_first_version_of_a_span_stays(database: Engine) -> None:
    store(database, [request(1, output_tokens=5)])
    assert store(database, [request(1, judgement(Verdict.MISSED), output_tokens=9)]) == []
    row = only_row(database)
    assert (row["output_tokens"], row["verdict"]) == (5, "met")
    assert counted_rollups(database) == counted_rows(database)


def test_spans_are_distinguished_by_both_ids_and_not_by_the_request(database: Engine) -> None:
    same: dict[str, Any] = {"request_id": "request-1"}
    spans = [
        request(1, **same),
        request(1, span_id=f"{2:016x}", **same),
        request(1, trace_id=f"{2:032x}", **same),
    ]
    assert len(store(database, spans)) == 3
    assert store(database, spans) == []


def test_an_empty_batch_stores_nothing(database: Engine) -> None:
    assert store(database, []) == []


def test_rows_of_a_rolled_back_transaction_are_new_when_sent_again(database: Engine) -> None:
    with for_writing(database).connect() as connection, connection.begin() as transaction:
        assert len(insert_new(connection, some([1, 2]))) == 2
        transaction.rollback()
    assert keys_of(store(database, some([1, 2, 3]))) == keys_of(some([1, 2, 3]))


def test_deleting_rows_does_not_make_stored_ones_new(database: Engine) -> None:
    """SQLite gives the rowid of a deleted last row to the next row."""
    store(database, some([1, 2, 3]))
    with for_writing(database).begin() as connection:
        connection.execute(text("DELETE FROM requests WHERE request_id = 'request-3'"))
    assert keys_of(store(database, some([1, 2, 3, 4]))) == keys_of(some([3, 4]))


def test_of_the_same_batch_from_many_threads_each_request_is_new_to_one(database: Engine) -> None:
    found: list[list[JudgedRequest]] = []
    with open_writer(database) as writer:

        def send() -> None:
            found.append(writer.submit(some(range(50))).result(WITHIN_S).new)

        in_threads([send] * 8)
    assert sorted(key for new in found for key in keys_of(new)) == keys_of(some(range(50)))
    assert stored_keys(database) == keys_of(some(range(50)))
    assert counted_rollups(database) == counted_rows(database)


@pytest.fixture
def two_engines(database_url: str, database: Engine) -> Iterator[tuple[Engine, Engine]]:
    """Two agents' connections to one database."""
    other = open_engine(database_url)
    yield database, other
    other.dispose()


@pytest.fixture
def two_engines_of_postgres(
    emptied_postgres_url: str, postgres: Engine
) -> Iterator[tuple[Engine, Engine]]:
    """Two agents' connections to PostgreSQL, where both can write at once."""
    other = open_engine(emptied_postgres_url)
    yield postgres, other
    other.dispose()


@pytest.mark.parametrize("names", [("agent-0", "agent-0"), ("agent-0", "agent-1")])
def test_two_agents_that_get_the_same_spans_at_once_store_each_once(
    two_engines: tuple[Engine, Engine], names: tuple[str, str]
) -> None:
    numbers = list(range(300))
    random.Random(1).shuffle(numbers)
    found: Counter[str] = Counter()
    failures: list[Exception] = []
    barrier = threading.Barrier(2)

    def agent(engine: Engine, name: str, direction: int) -> Callable[[], None]:
        write = request_write(engine)

        def send() -> None:
            try:
                for first in (*range(0, len(numbers), 100), 0):
                    barrier.wait()
                    batch = some(numbers[first : first + 100][::direction], agent=name)
                    found.update(trace for trace, _ in keys_of(write(batch).new))
            except Exception as error:
                failures.append(error)
                barrier.abort()

        return send

    here, there = two_engines
    in_threads([agent(here, names[0], 1), agent(there, names[1], -1)])
    assert failures == []
    assert found == Counter(trace for trace, _ in keys_of(some(range(300))))
    assert counted_rollups(two_engines[0]) == counted_rows(two_engines[0])


def test_two_agents_of_one_name_lose_no_count(two_engines: tuple[Engine, Engine]) -> None:
    """Both agents add to the same rollups."""

    def agent(engine: Engine, numbers: Sequence[int]) -> Callable[[], None]:
        write = request_write(engine)

        def send() -> None:
            for number in numbers:
                write([request(number)])

        return send

    here, there = two_engines
    in_threads([agent(here, range(40)), agent(there, range(40, 80))])
    assert [found.requests for found in counted_rollups(here).values()] == [80] * 6


def test_a_writer_waits_for_another_transaction_to_learn_whether_a_span_is_new(
    postgres: Engine,
) -> None:
    with postgres.connect() as connection:
        transaction = connection.begin()
        insert_new(connection, some([1, 2]))
        with open_writer(postgres) as writer:
            submitted = writer.submit(some([2, 3]))
            until_someone_waits(postgres)
            transaction.rollback()
            assert keys_of(submitted.result(WITHIN_S).new) == keys_of(some([2, 3]))


def test_agents_that_send_the_same_spans_in_opposite_orders_do_not_wait_for_each_other(
    two_engines_of_postgres: tuple[Engine, Engine],
) -> None:
    one, other = two_engines_of_postgres
    with one.connect() as third, open_writer(one) as first, open_writer(other) as second:
        transaction = third.begin()
        insert_new(third, some([5]))
        # Each stops at the locked row, and holds rows that the other needs next.
        futures = [first.submit(some(range(10))), second.submit(some(range(10))[::-1])]
        until_someone_waits(one, sessions=2)
        transaction.rollback()
        found = [key for future in futures for key in keys_of(future.result(WITHIN_S).new)]
    assert sorted(found) == keys_of(some(range(10)))


def _limit_parameters(connection: sqlite3.Connection, *_rest: object) -> None:
    connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 32_766)


@pytest.mark.slow
def test_one_batch_may_cover_more_minutes_than_a_statement_has_parameters(
    sqlite: Engine,
) -> None:
    """For example when an engine sends its whole backlog after a network failure."""
    # Debian's SQLite allows more than SQLite's own default.
    event.listen(sqlite, "checkout", _limit_parameters)
    minutes = 17_000
    batch = [request(n, ended_at=NOON - 60 * n + 30) for n in range(minutes)]
    assert len(store(sqlite, batch)) == minutes
    store(sqlite, [request(minutes, ended_at=NOON - 60 * (minutes - 1) + 30)])
    narrow = [found.requests for place, found in counted_rollups(sqlite).items() if place[0] <= 60]
    assert Counter(narrow) == {1: 2 * (minutes - 1), 2: 2}


def test_storing_scans_no_table(sqlite: Engine) -> None:
    """So a commit takes the same time with any number of rows and rollups."""
    statements: list[tuple[str, Any]] = []

    def listen(_c: object, _cursor: object, statement: str, given: Any, *_rest: object) -> None:
        if statement.startswith("SELECT"):
            statements.append((statement, given))

    store(sqlite, some([1, 2]))
    event.listen(sqlite, "before_cursor_execute", listen)
    store(sqlite, some([2, 3]))
    event.remove(sqlite, "before_cursor_execute", listen)
    assert len(statements) == 2
    with sqlite.connect() as connection:
        for statement, given in statements:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", given)
            assert not any(row.detail.startswith("SCAN") for row in plan), statement


def until_someone_waits(engine: Engine, sessions: int = 1) -> None:
    """Returns when this many database sessions wait for a lock."""
    waiting = text("SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted")

    def wait() -> bool:
        with engine.connect() as connection:
            return int(connection.execute(waiting).scalar_one()) >= sessions

    eventually(wait, within_s=WITHIN_S, what=f"{sessions} sessions wait")


def in_threads(works: Sequence[Callable[[], None]]) -> None:
    """Run each of these in a thread of its own."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
