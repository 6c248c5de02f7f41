"""What is in an agent's file is in the shared database, once, whatever happens to either."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, select, text

from agent import __version__
from agent.store.claim import NameClaim
from agent.store.connection import for_writing, without_number
from agent.store.observations import ObservationStore
from agent.store.publishing import publisher
from agent.store.publishing.changes import file_state
from agent.store.publishing.postgres import PostgresUpkeep
from agent.store.tables import (
    agents,
    events,
    requests,
)
from agent.store.transactions import request_amend
from tests.real_parts.postgres import PostgresServer
from tests.real_parts.waiting import eventually
from tests.store.making import (
    NOON,
    WITHIN_S,
    counted_rollups,
    counted_rows,
    ended_request,
    key_of,
    restart,
    some,
    store,
    stored_keys,
)
from tests.store.publishing.published import (
    Publishing,
    publishing,
    same_in_both,
    stored,
)
from tests.store.views import DUE, JUDGE, JoiningAgent, engine_view, proxy_view, states

DAY_S = 86400.0


def test_batches_may_end_anywhere(file: Engine, postgres: Engine) -> None:
    agent = JoiningAgent(file)
    with publishing(file, postgres, rows_per_batch=3) as to:
        for number in range(4):
            agent.take(proxy_view(number))
        agent.settle(DUE)
        for number in range(4):
            agent.take(engine_view(number))
        for number in range(100, 110):
            store(file, some([number]))
    # Before each batch, senders come first.
    assert to.given_way >= 10 / 3
    same_in_both(file, postgres)
    assert states(postgres).count(("joined", True, False)) == 4


def test_a_row_is_published_when_it_is_counted_and_again_when_its_verdict_is_final(
    file: Engine, postgres: Engine
) -> None:
    agent = JoiningAgent(file)
    agent.take(engine_view(1, ttft_s=None))

    def published() -> list[tuple[str, bool]]:
        with publishing(file, postgres):
            """Publish, and stop."""
        return [(row["verdict"], row["settles_at"] is None) for row in stored(postgres, requests)]

    assert published() == []
    agent.settle(DUE)
    assert published() == [("undetermined", False)]
    failed = ended_request(request_id="chatcmpl-1-0", finish_reason="error")
    request_amend(file, JUDGE)({key_of(engine_view(1, ttft_s=None)): failed}, [])
    agent.settle(DUE)
    assert published() == [("missed", True)]


def test_each_beat_writes_what_waits(
    file: Engine, postgres: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "BEAT_EVERY_S", 0.0)
    store(file, some(range(20)))
    running = Publishing(file, postgres)

    def waits(rows: int) -> bool:
        return [row["waiting_rows"] for row in stored(postgres, agents)] == [rows]

    with postgres.begin() as connection:
        connection.execute(text("LOCK TABLE requests"))
        running.publisher.start()
        eventually(lambda: waits(20), within_s=WITHIN_S, what="the lag")
    eventually(lambda: waits(0), within_s=WITHIN_S, what="a lag of nothing")
    running.publisher.close(WITHIN_S)
    (row,) = stored(postgres, agents)
    assert (row["lag_s"], row["version"]) == (0.0, __version__)
    assert row["stopped_at"] is not None


def test_a_row_waits_since_it_came_and_not_since_the_row_before_it(
    file: Engine,
    postgres: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher, "BEAT_EVERY_S", 0.0)
    store(file, some([1]))
    with publishing(file, postgres) as running:
        running.all_published()
        with without_number(for_writing(file)).begin() as connection:
            connection.execute(text("UPDATE publishing SET complete_at = '2020-01-01 00:00:00'"))

        def is_noted() -> bool:
            with file.connect() as connection:
                return time.time() - file_state(connection).complete_at < WITHIN_S

        eventually(is_noted, within_s=WITHIN_S, what="the time at which nothing waited")


def test_nothing_is_published_while_another_agent_has_the_name(
    file: Engine, postgres: Engine
) -> None:
    taken = NameClaim("agent-0", "elsewhere:1:other")
    taken.take(postgres)
    store(file, some([1]))
    with publishing(file, postgres) as running:
        eventually(
            lambda: "another agent" in str(running.publisher.problem()),
            within_s=WITHIN_S,
            what="the reason",
        )
        assert stored_keys(postgres) == []
        taken.release(postgres)
    assert len(stored_keys(postgres)) == 1


# Once


def test_a_batch_whose_commit_got_no_response_is_stored_once(
    file: Engine, postgres: Engine
) -> None:
    """The agent was killed after the commit there, before it was noted here."""
    store(file, some(range(5)))
    ObservationStore(file, "agent-0").write_event(restart(NOON))
    with publishing(file, postgres):
        pass
    with for_writing(file).begin() as connection:
        connection.execute(text("UPDATE publishing SET published = 0"))
    store(file, some(range(5, 8)))
    ObservationStore(file, "agent-0").write_event(restart(NOON + 1))
    with publishing(file, postgres):
        pass
    same_in_both(file, postgres)
    assert len(stored_keys(postgres)) == 8
    assert len(stored(postgres, events)) == 2


def test_a_row_that_the_shared_database_refuses_is_left_out_and_counted(
    file: Engine, postgres: Engine
) -> None:
    store(file, some(range(30)))
    store(file, some([30], model="m" * 5000))
    store(file, some(range(31, 60)))
    with publishing(file, postgres) as running:
        pass
    assert len(stored_keys(postgres)) == 59
    # Its row, its series and the rollups of this series.
    assert running.refused > 1
    assert counted_rollups(postgres) == counted_rows(postgres)


def test_a_database_that_is_too_slow_for_a_batch_gets_smaller_ones(
    file: Engine, postgres: Engine
) -> None:
    # Two seconds for the 40 rows.
    slow = "BEGIN PERFORM pg_sleep(0.05); RETURN NEW; END"
    with postgres.begin() as connection:
        for statement in (
            f"CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS '{slow}'",
            "CREATE TRIGGER slow BEFORE INSERT ON requests FOR EACH ROW EXECUTE FUNCTION slow()",
        ):
            connection.execute(text(statement))
    for number in range(0, 40, 4):
        store(file, some(range(number, number + 4)))
    try:
        with publishing(file, postgres, rows_per_batch=200, cut_off_s=1.3):
            pass
    finally:
        with postgres.begin() as connection:
            connection.execute(text("DROP FUNCTION slow CASCADE"))
    same_in_both(file, postgres)
    assert len(stored_keys(postgres)) == 40


# While the shared database is away


@contextmanager
def killed(server: PostgresServer, _url: str) -> Iterator[None]:
    server.kill()
    try:
        yield
    finally:
        server.restart()


@contextmanager
def frozen(server: PostgresServer, _url: str) -> Iterator[None]:
    with server.frozen():
        yield


def _sql(url: str, statement: str) -> None:
    # Of another database: this one may refuse connections.
    place = url.replace("+psycopg", "").rpartition("/")[0]
    with psycopg.connect(f"{place}/postgres", autocommit=True) as connection:
        connection.execute(statement.encode())


@contextmanager
def out_of_connections(_server: PostgresServer, url: str) -> Iterator[None]:
    name = url.rpartition("/")[2]
    _sql(url, f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
    _sql(url, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
    try:
        yield
    finally:
        _sql(url, f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")


@pytest.mark.slow
@pytest.mark.parametrize("outage", [killed, frozen, out_of_connections])
def test_what_is_stored_in_an_outage_is_published_in_order_after_it(
    file: Engine,
    postgres: Engine,
    emptied_postgres_url: str,
    postgres_server: PostgresServer,
    outage: Any,
) -> None:
    observations = ObservationStore(file, "agent-0")
    with publishing(file, postgres) as running:
        store(file, some(range(10)))
        running.all_published()
        with outage(postgres_server, emptied_postgres_url):
            for second in range(30):
                store(file, some(range(10 * second + 10, 10 * second + 20)))
                observations.write_event(restart(NOON + second))
            eventually(
                lambda: running.publisher.problem() is not None,
                within_s=WITHIN_S,
                what="the reason",
            )
            assert not running.publisher.is_complete(0)
            assert running.waiting() > 300
            store(file, some(range(1000, 1010)))
        # New rows keep coming while it catches up.
        store(file, some(range(2000, 2010)))
        running.all_published()
        eventually(
            lambda: running.publisher.problem() is None, within_s=WITHIN_S, what="no problem"
        )
    same_in_both(file, postgres)
    assert len(stored_keys(postgres)) == 330
    with postgres.connect() as connection:
        times = connection.execute(select(events.c.at).order_by(events.c.id)).scalars().all()
    assert times == [NOON + second for second in range(30)]


# Upkeep


def test_the_numbers_of_files_that_were_published_long_ago_go(
    postgres: Engine, emptied_postgres_url: str
) -> None:
    """Also of agents that are gone."""
    now = NOON + 500 * DAY_S
    number = text("INSERT INTO published_files VALUES ('gone', :file, 7, to_timestamp(:at))")
    with postgres.begin() as connection:
        for days in (399, 401):
            connection.execute(number, {"file": str(days), "at": now - days * DAY_S})
    upkeep = PostgresUpkeep(
        emptied_postgres_url, "agent-0", keep_requests_s=7 * DAY_S, keep_rollups_s=400 * DAY_S
    )
    upkeep.expire(now)
    upkeep.close()
    with postgres.connect() as connection:
        assert connection.scalars(text("SELECT file FROM published_files")).all() == ["399"]
