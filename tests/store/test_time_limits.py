"""Limits of time on PostgreSQL: a server that is frozen, and one that works for too long."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, literal, select, text

from agent.errors import StoreUnavailable
from agent.store.connection import in_transaction, open_engine, read_all, reading
from agent.store.time_limits import limit_waits, open_query_engine
from tests.real_parts.postgres import PostgresServer
from tests.store.making import some, store_in, stored_keys

ONE = select(literal(1))


@contextmanager
def limited(url: str, cut_off_s: float) -> Iterator[Engine]:
    """An engine with a limit."""
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


def test_a_server_that_froze_between_two_writes_is_left_too(
    postgres: Engine, emptied_postgres_url: str, postgres_server: PostgresServer
) -> None:
    """The pool asks whether a connection still lives: also that question must end."""
    with limited(f"{emptied_postgres_url}?connect_timeout=2", 1.0) as engine:
        # A machine that stops here has its connection cut off; the next one is asked for then.
        with suppress(StoreUnavailable):
            in_transaction(engine, lambda connection: connection.execute(ONE))
        with postgres_server.frozen(), pytest.raises(StoreUnavailable), reading(engine):
            pass
    assert read_all(postgres, ONE) == [(1,)]


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


def test_time_outs_in_the_url_hold(emptied_postgres_url: str) -> None:
    engine = open_engine(f"{emptied_postgres_url}?connect_timeout=15&tcp_user_timeout=30000")
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        expected = {"connect_timeout": "15", "tcp_user_timeout": "30000", "keepalives_idle": "5"}
        assert driver.info.get_parameters().items() >= expected.items()
    engine.dispose()
