"""Limits of time: queries without an end, a server that is frozen, away, or works for too long."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, literal, select, text

from agent.errors import QueryTooSlow, StoreUnavailable
from agent.store.connection import in_transaction, open_engine, reading
from agent.store.minute_sums import merge_minutes
from agent.store.minutes import MinuteStore
from agent.store.objectives import ObjectiveStore
from agent.store.retention import Retention
from agent.store.store_queries import StoreQueries
from agent.store.time_limits import limit_waits, open_query_engine
from tests.real_parts.postgres import PostgresServer
from tests.store.making import NOON, some, store_in, stored_keys

ONE = select(literal(1))


@contextmanager
def limited(url: str, cut_off_s: float) -> Iterator[Engine]:
    engine = open_engine(url, pool_pre_ping=False)
    limit_waits(engine, cut_off_s)
    yield engine
    engine.dispose()


def test_a_server_that_freezes_inside_a_transaction_does_not_hold_the_writer(
    postgres: Engine,
    emptied_postgres_url: str,
    postgres_server: PostgresServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store_in(postgres, some([1]))

    def delete(connection: Connection) -> None:
        connection.execute(text("DELETE FROM requests"))
        with postgres_server.frozen():
            connection.execute(text("SELECT 1"))

    with limited(emptied_postgres_url, 1.0) as engine:
        with pytest.raises(StoreUnavailable):
            in_transaction(engine, delete)
        assert "did not answer within 1 s" in caplog.text
    # What was cut off is rolled back, and its locks are free.
    store_in(postgres, some([2]))
    assert len(stored_keys(postgres)) == 2


def test_a_query_of_the_api_does_not_wait_for_a_frozen_server(
    emptied_postgres_url: str, postgres_server: PostgresServer
) -> None:
    """It is cut off some seconds after its limit, which the frozen server does not keep."""
    engine = open_query_engine(emptied_postgres_url, 0.5)

    def query() -> None:
        with reading(engine) as connection:
            cursor: Any = connection.connection.cursor()
            with postgres_server.frozen():
                cursor.execute("SELECT 1")

    with pytest.raises((StoreUnavailable, psycopg.OperationalError)):
        query()
    engine.dispose()


def test_connections_that_were_lost_while_idle_are_replaced(
    postgres: Engine, emptied_postgres_url: str
) -> None:
    """As after a restart of PostgreSQL: the next write must not fail for it."""
    with limited(emptied_postgres_url, 3600.0) as engine:
        with reading(engine) as connection:
            own = connection.scalar(text("SELECT pg_backend_pid()"))
        with postgres.connect() as other:
            other.execute(text(f"SELECT pg_terminate_backend({own}, 60000)"))
        with reading(engine) as connection:
            assert connection.scalar(text("SELECT pg_backend_pid()")) != own


def test_an_agent_that_hangs_inside_a_transaction_loses_it(postgres: Engine) -> None:
    with postgres.connect() as connection:
        shown = connection.scalar(text("SHOW idle_in_transaction_session_timeout"))
    assert shown == "1min"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", {"tcp_user_timeout": "10000", "keepalives_idle": "5", "keepalives_count": "3"}),
        (
            "?connect_timeout=15&tcp_user_timeout=30000",
            {"connect_timeout": "15", "tcp_user_timeout": "30000", "keepalives_idle": "5"},
        ),
    ],
)
def test_connections_time_out_and_time_outs_in_the_url_hold(
    emptied_postgres_url: str, given: str, expected: dict[str, str]
) -> None:
    engine = open_engine(f"{emptied_postgres_url}{given}")
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        assert driver.info.get_parameters().items() >= expected.items()
    engine.dispose()


ENDLESS = text(
    "WITH RECURSIVE counted(n) AS (SELECT 1 UNION ALL SELECT 1 FROM counted) "
    "SELECT sum(n) FROM counted"
)


@pytest.fixture
def limited_queries(new_url: str) -> Iterator[Engine]:
    engine = open_query_engine(new_url, 0.2)
    yield engine
    engine.dispose()


def test_an_endless_query_is_ended_and_its_connection_is_used_again(
    limited_queries: Engine,
) -> None:
    for _ in range(3):
        with pytest.raises(QueryTooSlow, match="query_timeout"), reading(limited_queries) as each:
            each.execute(ENDLESS)
    with reading(limited_queries) as connection:
        assert connection.execute(text("SELECT 1")).scalar_one() == 1


def test_a_query_of_many_statements_has_one_limit(limited_queries: Engine) -> None:
    def query_for_ever() -> None:
        with reading(limited_queries) as connection:
            while True:
                connection.execute(text("SELECT 1"))

    with pytest.raises(QueryTooSlow):
        query_for_ever()


def test_a_query_that_gets_no_connection_is_refused(new_url: str) -> None:
    engine = open_query_engine(new_url, 0.05)
    others = [engine.connect() for _ in range(18)]
    with pytest.raises(StoreUnavailable, match="does not answer"), reading(engine):
        pass
    for other in others:
        other.close()
    engine.dispose()


def test_what_anybody_may_read_of_a_failure_shows_no_host_and_no_user(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = open_engine("postgresql://secret-user@127.0.0.1:1/secret-database")
    for _ in range(3):
        with pytest.raises(StoreUnavailable) as refused, reading(engine):
            pass
        assert refused.value.public.startswith("the database does not answer")
        for secret in ("127.0.0.1", "secret-user", "secret-database"):
            assert secret not in refused.value.public
        assert "127.0.0.1" in str(refused.value)
    # The log has the cause, once a minute.
    assert caplog.text.count("127.0.0.1") == 1
    engine.dispose()


@pytest.fixture
def outage(postgres_server: PostgresServer) -> Iterator[PostgresServer]:
    """The server; it runs again after the test, also after a failed one."""
    yield postgres_server
    postgres_server.kill()
    postgres_server.restart()


def test_every_part_of_the_store_reports_an_unreachable_database_and_works_when_it_is_back(
    postgres: Engine, outage: PostgresServer
) -> None:
    queries, minutes = StoreQueries(postgres), MinuteStore(postgres, "agent-0")
    tasks = (
        lambda: ObjectiveStore(postgres, "agent-0").write_in_force([], NOON),
        lambda: Retention(postgres).expire(0, 0, NOON),
        lambda: minutes.expire(NOON),
        lambda: merge_minutes(postgres, "agent-0", NOON),
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
