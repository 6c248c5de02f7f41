import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Engine

from agent.errors import StoreUnavailable
from agent.records.event import Confidence, Event, EventKind
from agent.store.objectives import ObjectiveStore
from agent.store.observations import ObservationStore
from agent.store.retention import Retention
from agent.store.store_queries import StoreQueries
from agent.store.writing import RequestWriter
from tests.real_parts.postgres import PostgresServer
from tests.real_parts.waiting import eventually
from tests.store.making import (
    NOON,
    WITHIN_S,
    Key,
    counted_rollups,
    counted_rows,
    gpu_sample,
    keys_of,
    open_writer,
    some,
    store,
    stored_keys,
)
from tests.store.write_until_killed import BATCH

ACKNOWLEDGED_BEFORE_THE_END = 200


def test_requests_that_a_killed_process_acknowledged_are_stored(
    database: Engine, database_url: str
) -> None:
    command = [sys.executable, "-m", "tests.store.write_until_killed", database_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            reported = [process.stdout.readline() for _ in range(ACKNOWLEDGED_BEFORE_THE_END)]
        finally:
            process.kill()
        reported += process.stdout.readlines()
    acknowledged = {_key(line) for line in reported if line.endswith("\n")}
    assert len(acknowledged) >= ACKNOWLEDGED_BEFORE_THE_END
    stored = stored_keys(database)
    assert acknowledged <= set(stored)
    # A commit is atomic, rollups included.
    assert len(stored) % BATCH == 0
    assert counted_rollups(database) == counted_rows(database)
    assert len(store(database, some(range(-5, 0)))) == 5


def _key(line: str) -> Key:
    trace_id, span_id = line.split()
    return trace_id, span_id


@pytest.fixture
def outage(postgres_server: PostgresServer) -> Iterator[PostgresServer]:
    """The server; it runs again after the test, also after a failed one."""
    yield postgres_server
    postgres_server.kill()
    postgres_server.restart()


class Sender:
    """Sends batches one after another, each repeated until it is acknowledged."""

    def __init__(self, writer: RequestWriter, first: int) -> None:
        self._writer = writer
        self._first = first
        self.acknowledged: list[range] = []
        self.failures: list[str] = []
        self.reported: list[Key] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the last batch, and end."""
        self._stopping.set()
        self._thread.join()

    def _send(self) -> None:
        number = self._first
        while not self._stopping.is_set():
            batch = range(number, number + 5)
            try:
                self.reported += keys_of(self._writer.submit(some(batch)).result(WITHIN_S).new)
            except StoreUnavailable as error:
                self.failures.append(str(error))
                self._stopping.wait(0.01)
            else:
                self.acknowledged.append(batch)
                number += 5


@contextmanager
def sending(writer: RequestWriter) -> Iterator[list[Sender]]:
    """Three running senders, stopped at the end."""
    senders = [Sender(writer, 100_000 * n) for n in range(1, 4)]
    try:
        _until_each_got(senders, batches=10)
        yield senders
    finally:
        for sender in senders:
            sender.stop()


def test_a_killed_postgresql_loses_no_acknowledged_request_and_stores_the_rest_later(
    postgres: Engine, outage: PostgresServer
) -> None:
    with open_writer(postgres) as writer, sending(writer) as senders:
        outage.kill()
        eventually(
            lambda: all(sender.failures for sender in senders),
            within_s=WITHIN_S,
            what="each sender gets the failure",
        )
        with pytest.raises(StoreUnavailable):
            StoreQueries(postgres).request("nobody")
        before = [batch for sender in senders for batch in list(sender.acknowledged)]
        outage.restart()
        _until_each_got(senders, batches=10)
    stored = stored_keys(postgres)
    assert {key for batch in before for key in keys_of(some(batch))} <= set(stored)
    sent = [key for sender in senders for b in sender.acknowledged for key in keys_of(some(b))]
    # Rows whose commit was lost on the way back are stored, but no sender got them as new.
    assert set(sent) <= set(stored)
    reported = [key for sender in senders for key in sender.reported]
    assert len(reported) == len(set(reported))
    assert set(reported) <= set(stored)
    assert counted_rollups(postgres) == counted_rows(postgres)
    for sender in senders:
        assert all("\n" not in failure for failure in sender.failures)


def test_a_restarted_postgresql_stores_rows_at_once(
    postgres: Engine, outage: PostgresServer
) -> None:
    store(postgres, some([1]))
    outage.kill()
    outage.restart()
    assert len(store(postgres, some([1, 2]))) == 1
    StoreQueries(postgres).request("nobody")


def test_every_part_of_the_store_reports_an_unreachable_database_and_works_when_it_is_back(
    postgres: Engine, outage: PostgresServer
) -> None:
    observations, queries = ObservationStore(postgres, "agent-0"), StoreQueries(postgres)
    event = Event(at=NOON, engine="chat-0", kind=EventKind.RESTART, confidence=Confidence.CERTAIN)
    tasks = (
        lambda: store(postgres, some([1])),
        lambda: observations.write_event(event),
        lambda: observations.write_gpu_samples([gpu_sample(NOON)]),
        lambda: ObjectiveStore(postgres, "agent-0").write_in_force([], NOON),
        lambda: Retention(postgres).expire(0, 0, NOON),
        lambda: queries.request("request-1"),
        lambda: queries.newest_gpu_samples(NOON),
    )
    for task in tasks:
        task()
    outage.kill()
    for task in tasks:
        with pytest.raises(StoreUnavailable) as refused:
            task()
        assert "\n" not in str(refused.value)
    outage.restart()
    for task in tasks:
        task()


def _until_each_got(senders: list[Sender], batches: int) -> None:
    wanted = [len(sender.acknowledged) + batches for sender in senders]
    eventually(
        lambda: all(
            len(sender.acknowledged) >= count for sender, count in zip(senders, wanted, strict=True)
        ),
        within_s=WITHIN_S,
        what="each sender has batches acknowledged",
    )
