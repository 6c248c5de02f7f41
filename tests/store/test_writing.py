import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from agent.errors import StoreUnavailable
from agent.records.objective import JudgedRequest
from agent.records.write_result import WriteResult
from agent.store import connection as connections
from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from agent.store.writing import MAX_ROWS_PER_COMMIT, MAX_WAITING_ROWS, RequestWriter
from tests.real_parts.waiting import eventually
from tests.store.making import (
    WITHIN_S,
    Key,
    counted_rollups,
    counted_rows,
    key_of,
    keys_of,
    open_writer,
    request,
    some,
    stored_keys,
)


class Shelf:
    """A store in memory that can be held up, and refuses what a test wants."""

    def __init__(self) -> None:
        self.writes: list[list[JudgedRequest]] = []
        self.kept: set[Key] = set()
        self.refuses: Callable[[Sequence[JudgedRequest]], bool] = lambda _judged: False
        self.error: Exception = StoreUnavailable("the shelf is full")
        self.busy = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def write(self, judged: Sequence[JudgedRequest]) -> WriteResult:
        """What the writer calls for each commit."""
        self.writes.append(list(judged))
        self.busy.set()
        self.goes_on.wait()
        if self.refuses(judged):
            raise self.error
        new = {key_of(item): item for item in judged if key_of(item) not in self.kept}
        self.kept |= new.keys()
        return WriteResult(list(new.values()), list(new.values()))

    def hold_up(self, writer: RequestWriter) -> "Future[WriteResult]":
        """Keep the writer busy with one request, until `goes_on` is set."""
        self.goes_on.clear()
        self.busy.clear()
        held = writer.submit([request(-1)])
        self.busy.wait()
        return held


@pytest.fixture
def shelf() -> Shelf:
    """A store that takes everything."""
    return Shelf()


@pytest.fixture
def writer(shelf: Shelf) -> Iterator[RequestWriter]:
    """A writer to the shelf."""
    writer = RequestWriter(shelf.write)
    yield writer
    shelf.goes_on.set()
    writer.close()


def answers(submitted: Sequence["Future[WriteResult]"]) -> list[list[Key]]:
    """What each learned to be new."""
    return [keys_of(answer.result(WITHIN_S).new) for answer in submitted]


def test_who_waits_together_is_committed_together(shelf: Shelf, writer: RequestWriter) -> None:
    held = shelf.hold_up(writer)
    submitted = [writer.submit(some([2 * n, 2 * n + 1])) for n in range(50)]
    shelf.goes_on.set()
    assert answers(submitted) == [keys_of(some([2 * n, 2 * n + 1])) for n in range(50)]
    assert keys_of(held.result(WITHIN_S).new) == keys_of(some([-1]))
    assert [len(write) for write in shelf.writes] == [1, 100]


def test_each_gets_its_own_requests_which_were_new(shelf: Shelf, writer: RequestWriter) -> None:
    writer.submit(some([1, 2])).result(WITHIN_S)
    shelf.hold_up(writer)
    submitted = [writer.submit(some(numbers)) for numbers in ([1], [2, 3], [4, 4], [], [5, 1])]
    shelf.goes_on.set()
    assert answers(submitted) == [keys_of(some(new)) for new in ([], [3], [4], [], [5])]


def test_of_two_that_send_the_same_one_learns_that_it_is_new(
    shelf: Shelf, writer: RequestWriter
) -> None:
    shelf.hold_up(writer)
    same = some([1, 2])
    submitted = [writer.submit(same), writer.submit(some([2, 3])), writer.submit(same)]
    shelf.goes_on.set()
    found = [key for new in answers(submitted) for key in new]
    assert sorted(found) == keys_of(some([1, 2, 3]))


def test_a_commit_ends_when_it_is_full(shelf: Shelf, writer: RequestWriter) -> None:
    shelf.hold_up(writer)
    half = MAX_ROWS_PER_COMMIT // 2
    submitted = [writer.submit(some(range(n * half, (n + 1) * half))) for n in range(5)]
    shelf.goes_on.set()
    assert [len(new) for new in answers(submitted)] == [half] * 5
    assert [len(write) for write in shelf.writes] == [1, 2 * half, 2 * half, half]


def test_too_many_waiting_rows_are_refused_at_once_and_taken_later(
    shelf: Shelf, writer: RequestWriter
) -> None:
    shelf.hold_up(writer)
    waiting = [writer.submit(some(range(MAX_WAITING_ROWS - 1)))]
    assert writer.waiting_rows == MAX_WAITING_ROWS
    with pytest.raises(StoreUnavailable, match=f"{MAX_WAITING_ROWS} rows wait for the database"):
        writer.submit(some([1]))
    assert writer.waiting_rows == MAX_WAITING_ROWS
    shelf.goes_on.set()
    assert [len(new) for new in answers(waiting)] == [MAX_WAITING_ROWS - 1]
    until_none_waits(writer)
    assert answers([writer.submit(some([MAX_WAITING_ROWS]))]) == [keys_of(some([MAX_WAITING_ROWS]))]


def test_a_batch_over_the_limit_is_taken_when_nothing_waits(
    shelf: Shelf, writer: RequestWriter
) -> None:
    """It could never be stored otherwise."""
    assert (
        len(writer.submit(some(range(MAX_WAITING_ROWS + 1))).result(WITHIN_S).new)
        == MAX_WAITING_ROWS + 1
    )


def test_a_batch_that_is_refused_takes_no_other_with_it(
    shelf: Shelf, writer: RequestWriter
) -> None:
    shelf.refuses = lambda judged: any(item.record.model == "bad" for item in judged)
    shelf.hold_up(writer)
    good, bad = [writer.submit(some([n])) for n in (1, 2)], writer.submit(some([3], model="bad"))
    good.append(writer.submit(some([4])))
    shelf.goes_on.set()
    assert answers(good) == [keys_of(some([n])) for n in (1, 2, 4)]
    with pytest.raises(StoreUnavailable, match="the shelf is full"):
        bad.result(WITHIN_S)
    until_none_waits(writer)


def test_a_store_that_takes_nothing_is_not_waited_for_once_for_each_batch(
    shelf: Shelf, writer: RequestWriter
) -> None:
    held = shelf.hold_up(writer)
    shelf.refuses = lambda _judged: True
    submitted = [writer.submit(some([n])) for n in range(20)]
    shelf.goes_on.set()
    for answer in (held, *submitted):
        with pytest.raises(StoreUnavailable):
            answer.result(WITHIN_S)
    assert [len(write) for write in shelf.writes] == [1, 20, 0]
    until_none_waits(writer)
    shelf.refuses = lambda _judged: False
    assert answers([writer.submit(some(range(20)))]) == [keys_of(some(range(20)))]


def test_an_error_that_nobody_thought_of_ends_neither_the_writer_nor_the_others(
    shelf: Shelf, writer: RequestWriter, caplog: pytest.LogCaptureFixture
) -> None:
    shelf.error = ZeroDivisionError("nobody thought of it")
    shelf.refuses = lambda judged: any(item.record.model == "bad" for item in judged)
    shelf.hold_up(writer)
    bad, good = writer.submit(some([1], model="bad")), writer.submit(some([2]))
    with caplog.at_level(logging.ERROR):
        shelf.goes_on.set()
        with pytest.raises(StoreUnavailable, match="nobody thought of it"):
            bad.result(WITHIN_S)
    assert answers([good, writer.submit(some([3]))]) == [keys_of(some([n])) for n in (2, 3)]
    assert any(record.exc_info for record in caplog.records)


def test_who_leaves_before_the_answer_is_stored_and_holds_up_nobody(
    shelf: Shelf, writer: RequestWriter
) -> None:
    async def come_and_go() -> None:
        waiting = asyncio.wrap_future(writer.submit(some([1])))
        waiting.cancel()
        await asyncio.wait([waiting])

    shelf.hold_up(writer)
    asyncio.run(come_and_go())
    shelf.goes_on.set()
    assert answers([writer.submit(some([2]))]) == [keys_of(some([2]))]
    assert shelf.kept == set(keys_of(some([-1, 1, 2])))


def test_closing_commits_what_was_handed_in(shelf: Shelf, writer: RequestWriter) -> None:
    shelf.hold_up(writer)
    submitted = [writer.submit(some([n])) for n in range(10)]
    shelf.goes_on.set()
    writer.close()
    assert all(answer.done() for answer in submitted)
    assert shelf.kept == set(keys_of(some([-1, *range(10)])))
    writer.close()


def test_a_closed_writer_takes_nothing(writer: RequestWriter) -> None:
    writer.close()
    with pytest.raises(StoreUnavailable, match="the agent is stopping"):
        writer.submit(some([1]))


def test_what_is_handed_in_while_the_writer_closes_is_stored_or_refused(
    database: Engine,
) -> None:
    taken: list[Future[WriteResult]] = []
    with open_writer(database) as writer:
        has_begun = threading.Event()

        def send(first: int) -> None:
            number = first
            try:
                while True:
                    taken.append(writer.submit(some([number])))
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
    assert all(answer.done() for answer in taken)
    found = sorted(key for new in answers(taken) for key in new)
    assert stored_keys(database) == found
    assert len(found) == len(taken)


def test_many_senders_at_once_are_all_answered_right(database: Engine) -> None:
    senders, batches = 8, 20
    found: dict[int, list[list[Key]]] = {}
    with open_writer(database) as writer:

        def send(sender: int) -> None:
            # Every batch holds one request that is this sender's alone, and one that all send.
            submitted = [
                writer.submit(some([1000 * (sender + 1) + batch, batch]))
                for batch in range(batches)
            ]
            found[sender] = answers(submitted)

        threads = [threading.Thread(target=send, args=(sender,)) for sender in range(senders)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for batch in range(batches):
        (shared,), alone = keys_of(some([batch])), [found[sender][batch] for sender in found]
        assert sum(shared in new for new in alone) == 1
        for sender in found:
            (own,) = keys_of(some([1000 * (sender + 1) + batch]))
            assert set(found[sender][batch]) - {shared} == {own}
    assert len(stored_keys(database)) == batches * (senders + 1)
    assert counted_rollups(database) == counted_rows(database)


# What some database or driver does not take; whichever do not are answered, the others are stored.
UNSTORABLE: dict[str, dict[str, Any]] = {
    "a NUL": {"model": "lla\0ma"},
    "half a surrogate pair": {"request_id": "\ud800"},
    "a text beyond the column": {"request_id": "x" * 257},
    "a number beyond 64 bits": {"input_tokens": 2**63},
    "a moment beyond the calendar": {"started_at": 1e15},
    "a moment without end": {"ended_at": float("inf")},
    "a latency that is no number": {"ttft_s": float("nan")},
    "a latency without end": {"e2e_s": float("inf")},
    "nothing where something must be": {"trace_id": None},
}


def test_requests_that_no_database_takes_take_no_others_with_them(database: Engine) -> None:
    with open_writer(database) as writer:
        good: list[Future[WriteResult]] = []
        odd: list[Future[WriteResult]] = []
        with database.begin() as connection:
            # Whatever the database, everything is handed in before the first commit is done.
            connection.execute(text(TAKE_TABLE[database.dialect.name]))
            for number, given in enumerate(UNSTORABLE.values()):
                good.append(writer.submit(some([number])))
                odd.append(writer.submit(some([100 + number], **given)))
            good.append(writer.submit(some([50])))
        assert answers(good) == [keys_of(some([n])) for n in [*range(len(UNSTORABLE)), 50]]
        refused = [answer.exception(WITHIN_S) for answer in odd]
        assert {type(error) for error in refused} <= {StoreUnavailable, type(None)}
        assert answers([writer.submit(some([51]))]) == [keys_of(some([51]))]
    assert len(stored_keys(database)) == len(good) + 1 + refused.count(None)


TAKE_TABLE = {
    "sqlite": "UPDATE requests SET model = model",
    "postgresql": "LOCK TABLE requests IN EXCLUSIVE MODE",
}


def test_text_that_postgresql_refuses_takes_no_others_with_it(postgres: Engine) -> None:
    with open_writer(postgres) as writer:
        with postgres.begin() as connection:
            connection.execute(text(TAKE_TABLE["postgresql"]))
            good = [writer.submit(some([1]))]
            bad = writer.submit([request(2), request(3, tenant="a\0b")])
            good.append(writer.submit(some([4])))
        assert answers(good) == [keys_of(some([1])), keys_of(some([4]))]
        with pytest.raises(StoreUnavailable, match="cannot contain NUL"):
            bad.result(WITHIN_S)
    assert stored_keys(postgres) == keys_of(some([1, 4]))
    assert counted_rollups(postgres) == counted_rows(postgres)


def test_a_locked_sqlite_file_is_reported_and_does_for_the_next_when_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_SQLITE_WAIT_S", 0.05)
    engine = open_engine(f"sqlite:///{tmp_path}/goodput.db")
    upgrade(engine)
    other = sqlite3.connect(f"{tmp_path}/goodput.db", isolation_level=None)
    with open_writer(engine) as writer:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="database is locked"):
            writer.submit(some([1])).result(WITHIN_S)
        assert stored_keys(engine) == []
        other.execute("ROLLBACK")
        assert answers([writer.submit(some([1]))]) == [keys_of(some([1]))]
    other.close()
    engine.dispose()


def test_a_database_without_its_tables_is_reported_in_one_line(new_url: str) -> None:
    engine = open_engine(new_url)
    with open_writer(engine) as writer, pytest.raises(StoreUnavailable) as refused:
        writer.submit(some([1])).result(WITHIN_S)
    engine.dispose()
    assert "requests" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "INSERT" not in str(refused.value)


def until_none_waits(writer: RequestWriter) -> None:
    """Returns when everything is committed; the answer comes a moment before the count."""
    eventually(lambda: not writer.waiting_rows, within_s=WITHIN_S, what="no rows wait")
