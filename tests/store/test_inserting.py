import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

from agent.catalog.definitions import Verdict
from agent.records.objective import JudgedRequest
from agent.store.connection import for_writing
from agent.store.inserting import insert_new, key_of
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


def test_a_batch_sent_twice_is_stored_once_and_new_once(sqlite: Engine) -> None:
    batch = some(range(5))
    assert keys_of(store(sqlite, batch)) == keys_of(batch)
    assert store(sqlite, batch) == []
    assert stored_keys(sqlite) == keys_of(batch)


def test_of_a_batch_that_holds_old_and_new_the_new_are_returned(sqlite: Engine) -> None:
    store(sqlite, some([1, 4, 7]))
    assert keys_of(store(sqlite, some(range(9)))) == keys_of(some([0, 2, 3, 5, 6, 8]))
    assert stored_keys(sqlite) == keys_of(some(range(9)))


def test_a_span_twice_in_one_batch_is_stored_and_returned_once(
    sqlite: Engine,
) -> None:
    batch = some([1, 2, 1, 3, 3, 3])
    assert keys_of(store(sqlite, batch)) == keys_of(some([1, 2, 3]))
    assert stored_keys(sqlite) == keys_of(some([1, 2, 3]))
    assert counted_rollups(sqlite) == counted_rows(sqlite)


@pytest.mark.parametrize("rows", [1, 24, 25, 26, 49, 50, 63])
def test_a_batch_of_any_size_is_stored_in_its_order(sqlite: Engine, rows: int) -> None:
    batch = some(range(rows))
    assert keys_of(store(sqlite, [*batch, batch[-1]])) == keys_of(batch)
    with sqlite.connect() as connection:
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


def test_the_first_version_of_a_span_stays(sqlite: Engine) -> None:
    store(sqlite, [request(1, output_tokens=5)])
    assert store(sqlite, [request(1, judgement(Verdict.MISSED), output_tokens=9)]) == []
    row = only_row(sqlite)
    assert (row["output_tokens"], row["verdict"]) == (5, "met")
    assert counted_rollups(sqlite) == counted_rows(sqlite)


def test_spans_are_distinguished_by_both_ids_and_not_by_the_request(sqlite: Engine) -> None:
    same: dict[str, Any] = {"request_id": "request-1"}
    spans = [
        request(1, **same),
        request(1, span_id=f"{2:016x}", **same),
        request(1, trace_id=f"{2:032x}", **same),
    ]
    assert len(store(sqlite, spans)) == 3
    assert store(sqlite, spans) == []


def test_an_empty_batch_stores_nothing(sqlite: Engine) -> None:
    assert store(sqlite, []) == []


def test_rows_of_a_rolled_back_transaction_are_new_when_sent_again(sqlite: Engine) -> None:
    with for_writing(sqlite).connect() as connection, connection.begin() as transaction:
        assert len(insert_new(connection, some([1, 2]))) == 2
        transaction.rollback()
    assert keys_of(store(sqlite, some([1, 2, 3]))) == keys_of(some([1, 2, 3]))


def test_deleting_rows_does_not_make_stored_ones_new(sqlite: Engine) -> None:
    """SQLite gives the rowid of a deleted last row to the next row."""
    store(sqlite, some([1, 2, 3]))
    with for_writing(sqlite).begin() as connection:
        connection.execute(text("DELETE FROM requests WHERE request_id = 'request-3'"))
    assert keys_of(store(sqlite, some([1, 2, 3, 4]))) == keys_of(some([3, 4]))


def test_of_the_same_batch_from_many_threads_each_request_is_new_to_one(sqlite: Engine) -> None:
    found: list[list[JudgedRequest]] = []
    with open_writer(sqlite) as writer:

        def send() -> None:
            found.append(writer.submit(some(range(50))).result(WITHIN_S).new)

        in_threads([send] * 8)
    assert sorted(key for new in found for key in keys_of(new)) == keys_of(some(range(50)))
    assert stored_keys(sqlite) == keys_of(some(range(50)))
    assert counted_rollups(sqlite) == counted_rows(sqlite)


# SQLite's own default is 32,766; a statement of rows needs half of these.
MOST_PARAMETERS = 2_500


def _limit_parameters(connection: sqlite3.Connection, *_rest: object) -> None:
    connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, MOST_PARAMETERS)


@pytest.mark.slow
def test_one_batch_may_cover_more_minutes_than_a_statement_has_parameters(
    sqlite: Engine,
) -> None:
    """For example when an engine sends its whole backlog after a network failure."""
    event.listen(sqlite, "checkout", _limit_parameters)
    minutes = MOST_PARAMETERS + 100
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


def in_threads(works: Sequence[Callable[[], None]]) -> None:
    """Run each of these in a thread of its own."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
