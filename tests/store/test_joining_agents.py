"""Concurrent joining: several agents on one database, several senders at one writer."""

import logging
import random
import threading
from collections.abc import Iterator, Sequence

import pytest
from sqlalchemy import Engine

from agent.errors import StoreUnavailable
from agent.records.objective import JudgedRequest, WriteResult
from agent.records.request import Vantage
from agent.store.connection import for_writing, open_engine
from agent.store.inserting import insert_new
from agent.store.joining import waiting_for
from agent.store.writing import RequestWriter
from tests.store.making import (
    WITHIN_S,
    counted_rollups,
    counted_rows,
    keys_of,
    rollup_bytes,
    store,
)
from tests.store.views import (
    DUE,
    WAIT_S,
    JoiningAgent,
    empty,
    engine_view,
    proxy_view,
    rows,
    states,
)

REQUESTS = range(60)


@pytest.fixture
def other(database_url: str, database: Engine) -> Iterator[Engine]:
    """Another agent's connections to the same database."""
    engine = open_engine(database_url)
    yield engine
    engine.dispose()


@pytest.mark.parametrize("settles_first", ["agent-0", "agent-1"])
def test_views_that_two_agents_store_at_once_are_joined_when_due(
    postgres: Engine, settles_first: str
) -> None:
    with for_writing(postgres).begin() as connection:
        # This row stays uncommitted until the other agent has committed its view.
        insert_new(connection, [proxy_view(1)], waiting_for(WAIT_S))
        JoiningAgent(postgres, "agent-1").take(engine_view(1, agent="agent-1"))
    assert [waits for _, _, waits in states(postgres)] == [True, True]
    settled = JoiningAgent(postgres, settles_first).settle(DUE)
    assert [item.record.vantage for item in settled] == [Vantage.JOINED]
    assert states(postgres) == [("joined", True, False)]
    assert counted_rollups(postgres) == counted_rows(postgres)


def test_two_agents_that_get_views_of_the_same_requests_at_once_count_each_once(
    database: Engine, other: Engine
) -> None:
    views = [view for n in REQUESTS for view in (proxy_view(n), engine_view(n))]
    JoiningAgent(database).take(*views)
    at_once = rows(database), rollup_bytes(database)
    empty(database)
    barrier = threading.Barrier(2)
    failures: list[Exception] = []
    counted: list[JudgedRequest] = []

    def work(engine: Engine, seed: int) -> None:
        agent, order = JoiningAgent(engine), random.Random(seed).sample(views, len(views))
        try:
            for first in range(0, len(order), 6):
                barrier.wait()
                counted.extend(agent.take(*order[first : first + 6]).counted)
                counted.extend(agent.settle(DUE - 1))
        except Exception as error:
            failures.append(error)
            barrier.abort()

    threads = [
        threading.Thread(target=work, args=(engine, seed))
        for seed, engine in enumerate((database, other))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted += JoiningAgent(database).settle(DUE)
    assert failures == []
    assert (rows(database), rollup_bytes(database)) == at_once
    assert keys_of(counted) == keys_of(engine_view(n) for n in REQUESTS)


def test_two_agents_that_settle_at_once_count_each_once(database: Engine, other: Engine) -> None:
    here, there = JoiningAgent(database), JoiningAgent(other)
    for first in range(0, 200, 20):
        here.take(*(proxy_view(n) for n in range(first, first + 20)))
    results: list[list[JudgedRequest]] = []
    threads = [
        threading.Thread(target=lambda agent=agent: results.append(agent.settle(DUE)))
        for agent in (here, there)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert keys_of(item for settled in results for item in settled) == keys_of(
        proxy_view(n) for n in range(200)
    )
    assert counted_rollups(database) == counted_rows(database)


class HeldAgent:
    """An agent whose writes wait until a test sets `goes_on`."""

    def __init__(self, agent: JoiningAgent) -> None:
        self._agent = agent
        self.busy = threading.Event()
        self.goes_on = threading.Event()
        self.batches: list[int] = []

    def write(self, judged: Sequence[JudgedRequest]) -> WriteResult:
        """The writer calls this for each commit."""
        self.busy.set()
        self.goes_on.wait(WITHIN_S)
        self.batches.append(len(judged))
        return self._agent.write(judged)


def test_senders_of_one_commit_get_their_own_views_and_each_request_once(
    database: Engine,
) -> None:
    agent = JoiningAgent(database)
    agent.take(proxy_view(1))
    held = HeldAgent(agent)
    writer = RequestWriter(held.write, agent.settle)
    busy = writer.submit([engine_view(9, parent_span_id=None)])
    assert held.busy.wait(WITHIN_S)
    batches = (
        [engine_view(1)],
        [engine_view(2), engine_view(3)],
        [proxy_view(2), proxy_view(1)],
        [proxy_view(3), engine_view(4, parent_span_id=None)],
    )
    submitted = [writer.submit(batch) for batch in batches]
    settling = writer.settle(DUE)
    held.goes_on.set()
    results = [future.result(WITHIN_S) for future in submitted]
    settled = settling.result(WITHIN_S)
    writer.close()
    assert held.batches == [1, 7]
    assert len(busy.result().counted) == 1
    assert [keys_of(result.new) for result in results] == [
        keys_of(batches[0]),
        keys_of(batches[1]),
        keys_of([proxy_view(2)]),
        keys_of(batches[3]),
    ]
    # A view that was settled before its other view came is joined late and not reported again.
    counted = [item for result in results for item in result.counted]
    first = [item.record.trace_id for item in [*counted, *settled]]
    assert sorted(first) == [proxy_view(n).record.trace_id for n in (1, 2, 3, 4)]
    assert counted_rollups(database) == counted_rows(database)


def test_a_joined_request_is_reported_to_the_sender_who_completed_it(database: Engine) -> None:
    agent = JoiningAgent(database)
    agent.take(proxy_view(1), engine_view(2))
    held = HeldAgent(agent)
    writer = RequestWriter(held.write, agent.settle)
    writer.submit([engine_view(9, parent_span_id=None)])
    assert held.busy.wait(WITHIN_S)
    submitted = [
        writer.submit([view])
        for view in (engine_view(1), proxy_view(2), proxy_view(3), engine_view(3))
    ]
    held.goes_on.set()
    results = [future.result(WITHIN_S).counted for future in submitted]
    writer.close()
    assert [keys_of(counted) for counted in results] == [
        keys_of([engine_view(1)]),
        keys_of([engine_view(2)]),
        keys_of([engine_view(3)]),
        [],
    ]


def test_a_settling_that_fails_is_reported_and_the_writer_keeps_working(
    database: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[Exception] = [StoreUnavailable("the disk is full"), RuntimeError("unexpected")]

    def settle(now: float) -> list[JudgedRequest]:
        raise errors.pop(0)

    writer = RequestWriter(JoiningAgent(database).write, settle)
    with pytest.raises(StoreUnavailable, match="the disk is full"):
        writer.settle(DUE).result(WITHIN_S)
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(StoreUnavailable, match=r"could not be settled: RuntimeError"),
    ):
        writer.settle(DUE).result(WITHIN_S)
    assert any(record.exc_info for record in caplog.records)
    assert len(writer.submit([proxy_view(1)]).result(WITHIN_S).new) == 1
    writer.close()
    with pytest.raises(StoreUnavailable, match="stopping"):
        writer.settle(DUE)


def test_a_writer_without_joining_settles_nothing(database: Engine) -> None:
    writer = RequestWriter(lambda judged: WriteResult(store(database, judged), []))
    assert writer.settle(DUE).result(WITHIN_S) == []
    writer.close()
