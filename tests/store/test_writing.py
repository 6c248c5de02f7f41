"""Requests are written: inserted once, by one writer of many senders."""

import asyncio
import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text

from agent.catalog.definitions import Verdict
from agent.errors import StoreUnavailable
from agent.records.objective import JudgedRequest, WriteResult
from agent.store import transactions
from agent.store.connection import for_writing
from agent.store.inserting import insert_new
from agent.store.writing import MAX_ROWS_PER_COMMIT, MAX_WAITING_ROWS, RequestWriter
from tests.real_parts.waiting import eventually
from tests.store.making import (
    NOON,
    WITHIN_S,
    Key,
    counted_rollups,
    counted_rows,
    judgement,
    key_of,
    keys_of,
    only_row,
    open_writer,
    request,
    some,
    store,
    stored_keys,
)
from tests.store.views import proxy_view


@pytest.mark.parametrize(
    ("batches", "new"),
    [
        ((range(5), range(5)), (range(5), ())),
        (([1, 4, 7], range(9)), ([1, 4, 7], [0, 2, 3, 5, 6, 8])),
        (([1, 2, 1, 3, 3, 3],), ([1, 2, 3],)),
        (((),), ((),)),
    ],
    ids=["sent twice", "old and new", "twice in one batch", "empty"],
)
def test_each_span_is_stored_once_and_new_once(
    sqlite: Engine, batches: Sequence[Sequence[int]], new: Sequence[Sequence[int]]
) -> None:
    assert [keys_of(store(sqlite, some(batch))) for batch in batches] == [
        keys_of(some(numbers)) for numbers in new
    ]
    assert stored_keys(sqlite) == keys_of(some(number for numbers in new for number in numbers))
    assert counted_rollups(sqlite) == counted_rows(sqlite)


@pytest.mark.parametrize("rows", [1, 24, 25, 26, 50, 63])
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


def test_deleting_rows_does_not_make_stored_ones_new(sqlite: Engine) -> None:
    """SQLite gives the rowid of a deleted last row to the next row."""
    store(sqlite, some([1, 2, 3]))
    with for_writing(sqlite).begin() as connection:
        connection.execute(text("DELETE FROM requests WHERE request_id = 'request-3'"))
    assert keys_of(store(sqlite, some([1, 2, 3, 4]))) == keys_of(some([3, 4]))


# SQLite's own default is 32,766; a statement of rows needs half of these.
MOST_PARAMETERS = 1_500


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


class Shelf:
    """A store in memory that a test can delay, and that refuses chosen requests."""

    def __init__(self) -> None:
        self.writes: list[list[JudgedRequest]] = []
        self.stored: set[Key] = set()
        self.refuses: Callable[[Sequence[JudgedRequest]], bool] = lambda _judged: False
        self.error: Exception = StoreUnavailable("the shelf is full")
        self.busy = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def write(self, judged: Sequence[JudgedRequest]) -> WriteResult:
        self.writes.append(list(judged))
        self.busy.set()
        self.goes_on.wait()
        if self.refuses(judged):
            raise self.error
        new = {key_of(item): item for item in judged if key_of(item) not in self.stored}
        self.stored |= new.keys()
        return WriteResult(*[list(new.values())] * 3)

    def hold_up(self, writer: RequestWriter) -> "Future[WriteResult]":
        self.goes_on.clear()
        self.busy.clear()
        held = writer.submit([request(-1)])
        self.busy.wait()
        return held


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def writer(shelf: Shelf) -> Iterator[RequestWriter]:
    writer = RequestWriter(shelf.write)
    yield writer
    shelf.goes_on.set()
    writer.close()


def new_keys(submitted: Sequence["Future[WriteResult]"]) -> list[list[Key]]:
    return [keys_of(future.result(WITHIN_S).new) for future in submitted]


def test_waiting_batches_are_committed_together(shelf: Shelf, writer: RequestWriter) -> None:
    held = shelf.hold_up(writer)
    submitted = [writer.submit(some([2 * n, 2 * n + 1])) for n in range(50)]
    shelf.goes_on.set()
    assert new_keys(submitted) == [keys_of(some([2 * n, 2 * n + 1])) for n in range(50)]
    assert keys_of(held.result(WITHIN_S).new) == keys_of(some([-1]))
    assert [len(write) for write in shelf.writes] == [1, 100]


def test_senders_have_their_result_before_the_work_between_commits(shelf: Shelf) -> None:
    done, goes_on = threading.Event(), threading.Event()

    def between() -> None:
        done.set()
        goes_on.wait(WITHIN_S)

    writer = RequestWriter(shelf.write, between=between)
    stored = writer.submit(some(range(3)))
    assert keys_of(stored.result(WITHIN_S).new) == keys_of(some(range(3)))
    assert done.wait(WITHIN_S)
    assert not goes_on.is_set()
    assert writer.lag_s == 0.0
    late = writer.submit(some(range(3, 5)))
    eventually(lambda: writer.lag_s > 0.0, within_s=WITHIN_S, what="a lag while it takes long")
    goes_on.set()
    late.result(WITHIN_S)
    writer.close()
    assert writer.lag_s == 0.0


def test_a_failure_between_commits_does_not_end_the_writer(shelf: Shelf) -> None:
    def between() -> None:
        raise RuntimeError("unexpected")

    writer = RequestWriter(shelf.write, between=between)
    for number in range(2):
        stored = writer.submit([request(number)])
        assert keys_of(stored.result(WITHIN_S).new) == keys_of([request(number)])
    writer.close()


def test_each_sender_gets_its_own_new_requests(shelf: Shelf, writer: RequestWriter) -> None:
    writer.submit(some([1, 2])).result(WITHIN_S)
    shelf.hold_up(writer)
    sent: Sequence[Sequence[int]] = ([1], [2, 3], [4, 4], [], [5, 1, 3])
    submitted = [writer.submit(some(numbers)) for numbers in sent]
    shelf.goes_on.set()
    found = new_keys(submitted)
    assert (found[0], found[2:4]) == ([], [keys_of(some([4])), []])
    # Of two senders of a request one gets it.
    assert sorted(key for new in found for key in new) == keys_of(some([3, 4, 5]))
    assert new_keys([writer.submit(some([1]))]) == [[]]


def test_a_commit_ends_when_it_is_full(shelf: Shelf, writer: RequestWriter) -> None:
    shelf.hold_up(writer)
    half = MAX_ROWS_PER_COMMIT // 2
    submitted = [writer.submit(some(range(n * half, (n + 1) * half))) for n in range(5)]
    shelf.goes_on.set()
    assert [len(new) for new in new_keys(submitted)] == [half] * 5
    assert [len(write) for write in shelf.writes] == [1, 2 * half, 2 * half, half]


def test_too_many_waiting_rows_are_refused_at_once_and_accepted_later(
    shelf: Shelf, writer: RequestWriter
) -> None:
    shelf.hold_up(writer)
    waiting = [writer.submit(some(range(MAX_WAITING_ROWS - 1)))]
    assert writer.waiting_rows == MAX_WAITING_ROWS
    with pytest.raises(StoreUnavailable, match=f"{MAX_WAITING_ROWS} rows wait for the database"):
        writer.submit(some([1]))
    assert writer.waiting_rows == MAX_WAITING_ROWS
    shelf.goes_on.set()
    assert [len(new) for new in new_keys(waiting)] == [MAX_WAITING_ROWS - 1]
    until_none_waits(writer)
    assert new_keys([writer.submit(some([MAX_WAITING_ROWS]))]) == [
        keys_of(some([MAX_WAITING_ROWS]))
    ]


def test_a_batch_over_the_limit_is_accepted_when_no_rows_wait(
    shelf: Shelf, writer: RequestWriter
) -> None:
    """It could never be stored otherwise."""
    assert (
        len(writer.submit(some(range(MAX_WAITING_ROWS + 1))).result(WITHIN_S).new)
        == MAX_WAITING_ROWS + 1
    )


def test_a_store_that_refuses_everything_is_not_tried_once_for_each_batch(
    shelf: Shelf, writer: RequestWriter
) -> None:
    held = shelf.hold_up(writer)
    shelf.refuses = lambda _judged: True
    submitted = [writer.submit(some([n])) for n in range(20)]
    shelf.goes_on.set()
    for future in (held, *submitted):
        with pytest.raises(StoreUnavailable):
            future.result(WITHIN_S)
    assert [len(write) for write in shelf.writes] == [1, 20]
    until_none_waits(writer)
    shelf.refuses = lambda _judged: False
    assert new_keys([writer.submit(some(range(20)))]) == [keys_of(some(range(20)))]


def test_an_unexpected_error_does_not_end_the_writer(
    shelf: Shelf, writer: RequestWriter, caplog: pytest.LogCaptureFixture
) -> None:
    shelf.error = ZeroDivisionError("unexpected")
    shelf.refuses = lambda judged: any(item.record.model == "bad" for item in judged)
    with caplog.at_level(logging.ERROR), pytest.raises(StoreUnavailable, match="unexpected"):
        writer.submit(some([1], model="bad")).result(WITHIN_S)
    assert new_keys([writer.submit(some([2]))]) == [keys_of(some([2]))]
    assert any(record.exc_info for record in caplog.records)


def test_a_batch_whose_sender_left_is_stored_and_delays_no_other(
    shelf: Shelf, writer: RequestWriter
) -> None:
    async def come_and_go() -> None:
        waiting = asyncio.wrap_future(writer.submit(some([1])))
        waiting.cancel()
        await asyncio.wait([waiting])

    shelf.hold_up(writer)
    asyncio.run(come_and_go())
    shelf.goes_on.set()
    assert new_keys([writer.submit(some([2]))]) == [keys_of(some([2]))]
    assert shelf.stored == set(keys_of(some([-1, 1, 2])))


def test_a_closed_writer_has_committed_every_batch(shelf: Shelf, writer: RequestWriter) -> None:
    shelf.hold_up(writer)
    submitted = [writer.submit(some([n])) for n in range(10)]
    shelf.goes_on.set()
    writer.close()
    assert all(future.done() for future in submitted)
    assert shelf.stored == set(keys_of(some([-1, *range(10)])))
    writer.close()
    with pytest.raises(StoreUnavailable, match="the agent is stopping"):
        writer.submit(some([1]))


def test_requests_submitted_while_the_writer_closes_are_stored_or_refused(
    sqlite: Engine,
) -> None:
    accepted: list[Future[WriteResult]] = []
    with open_writer(sqlite) as writer:
        has_begun = threading.Event()

        def send(first: int) -> None:
            number = first
            try:
                while True:
                    accepted.append(writer.submit(some([number])))
                    has_begun.set()
                    number += 4
            except StoreUnavailable:
                return

        senders = [threading.Thread(target=send, args=(first,)) for first in range(4)]
        for sender in senders:
            sender.start()
        has_begun.wait()
        writer.close()
        for sender in senders:
            sender.join()
    assert all(future.done() for future in accepted)
    found = sorted(key for new in new_keys(accepted) for key in new)
    assert stored_keys(sqlite) == found
    assert len(found) == len(accepted)


# Values that some database or driver refuses; refusals are reported, the other rows are stored.
UNSTORABLE: dict[str, dict[str, Any]] = {
    "a NUL": {"model": "lla\0ma"},
    "half a surrogate pair": {"request_id": "\ud800"},
    "a text longer than the column": {"request_id": "x" * 257},
    "a number beyond 64 bits": {"input_tokens": 2**63},
    "a time beyond the calendar": {"started_at": 1e15},
    "an infinite time": {"ended_at": float("inf")},
    "a latency that is no number": {"ttft_s": float("nan")},
    "an infinite latency": {"e2e_s": float("inf")},
    "null where a value is required": {"trace_id": None},
}


def test_of_one_batch_only_what_the_database_refuses_is_left_out(sqlite: Engine) -> None:
    odd = [request(100 + place, **given) for place, given in enumerate(UNSTORABLE.values())]
    batch = [item for place, bad in enumerate(odd) for item in (request(place), bad)]
    with open_writer(sqlite) as writer:
        result = writer.submit(batch).result(WITHIN_S)
        assert new_keys([writer.submit(some([51]))]) == [keys_of(some([51]))]
    assert {key_of(item) for item in result.new} | {key_of(item) for item in result.refused} == {
        key_of(item) for item in batch
    }
    assert set(keys_of(some(range(len(odd))))) <= {key_of(item) for item in result.new}
    # SQLite stores some of them.
    assert len(result.refused) >= 5
    assert len(stored_keys(sqlite)) == len(result.new) + 1
    assert counted_rollups(sqlite) == counted_rows(sqlite)


def test_each_sender_gets_its_own_refused_requests(sqlite: Engine) -> None:
    good: list[Future[WriteResult]] = []
    odd: list[Future[WriteResult]] = []
    with open_writer(sqlite) as writer:
        with sqlite.begin() as connection:
            # The lock makes sure that everything is submitted before the first commit.
            connection.execute(text("UPDATE requests SET model = model"))
            for number in range(4):
                good.append(writer.submit(some([number])))
                odd.append(writer.submit(some([100 + number], input_tokens=2**63)))
        assert new_keys(good) == [keys_of(some([number])) for number in range(4)]
        refused = [future.result(WITHIN_S).refused for future in odd]
    assert [keys_of(each) for each in refused] == [keys_of(some([100 + n])) for n in range(4)]


def test_an_unexpected_error_of_one_row_costs_no_other_row(
    sqlite: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    def fails_for_three(
        connection: Connection, judged: Sequence[JudgedRequest], *rest: Any
    ) -> list[JudgedRequest]:
        if any(key_of(item) in keys_of(some([3])) for item in judged):
            raise ZeroDivisionError("unexpected")
        return insert_new(connection, judged, *rest)

    monkeypatch.setattr(transactions, "insert_new", fails_for_three)
    with open_writer(sqlite) as writer:
        result = writer.submit(some(range(5))).result(WITHIN_S)
    assert [key_of(item) for item in result.refused] == keys_of(some([3]))
    assert stored_keys(sqlite) == keys_of(some([0, 1, 2, 4]))
    assert any(record.exc_info for record in caplog.records)


def test_without_the_table_no_row_is_refused(sqlite: Engine) -> None:
    """They are all good: what is wrong is the database."""
    with sqlite.begin() as connection:
        connection.execute(text("ALTER TABLE requests RENAME TO elsewhere"))
    with open_writer(sqlite) as writer:
        with pytest.raises(StoreUnavailable, match="no such table"):
            writer.submit(some([1, 2])).result(WITHIN_S)
        with sqlite.begin() as connection:
            connection.execute(text("ALTER TABLE elsewhere RENAME TO requests"))
        assert new_keys([writer.submit(some([1, 2]))]) == [keys_of(some([1, 2]))]


def until_none_waits(writer: RequestWriter) -> None:
    """Returns when everything is committed; results arrive shortly before the count is zero."""
    eventually(lambda: not writer.waiting_rows, within_s=WITHIN_S, what="no rows wait")
