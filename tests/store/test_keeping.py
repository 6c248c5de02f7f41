"""A database that is away at first, on real servers: who uses it, and what they are told."""

import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine, text

from agent.errors import StoreUnavailable
from agent.store.claim import NameClaim, own_instance
from agent.store.connection import for_writing, in_transaction, open_engine
from agent.store.health import StoreHealth
from agent.store.keeping import StoreKeeper
from agent.store.query_limits import open_query_engine
from agent.store.store_queries import StoreQueries
from tests.real_parts.ports import free_port
from tests.real_parts.postgres import PostgresServer
from tests.real_parts.waiting import eventually

WITHIN_S = 60.0


def _read(engine: Engine) -> None:
    StoreQueries(engine).request("nobody")


@contextmanager
def kept(url: str) -> Iterator[tuple[StoreKeeper, Engine, StoreHealth]]:
    engine, queries, health = open_engine(url), open_query_engine(url, 10.0), StoreHealth()
    keeper = StoreKeeper(
        url,
        [engine, queries],
        claim=NameClaim("chat", own_instance()),
        prepare=_read,
        health=health,
        sets_aside=False,
    )
    keeper.start(wait_s=WITHIN_S)
    try:
        yield keeper, engine, health
    finally:
        keeper.close()
        engine.dispose()
        queries.dispose()


def write(engine: Engine) -> None:
    in_transaction(engine, lambda connection: connection.execute(text("SELECT 1")))


def test_without_a_server_everybody_is_told_so_and_nobody_learns_where_it_is() -> None:
    port = free_port()
    with kept(f"postgresql://owner:s3cret@127.0.0.1:{port}/goodput") as (keeper, engine, health):
        problem = health.problem()
        assert problem is not None
        assert "the database cannot be reached" in problem
        with pytest.raises(StoreUnavailable, match="the database cannot be reached") as refused:
            write(engine)
        with pytest.raises(StoreUnavailable, match="the database cannot be reached"):
            keeper.verify()
        for said in (problem, refused.value.public):
            assert not any(word in said for word in ("127.0.0.1", str(port), "owner", "s3cret"))


def test_a_database_that_is_made_later_is_opened_and_used(postgres_server: PostgresServer) -> None:
    name = f"later_{secrets.token_hex(4)}"
    url = postgres_server.url(name)
    with (
        kept(url) as (keeper, engine, health),
        psycopg.connect(
            postgres_server.url("postgres").replace("+psycopg", ""), autocommit=True
        ) as server,
    ):
        with pytest.raises(StoreUnavailable, match="cannot be"):
            write(engine)
        server.execute(f"CREATE DATABASE {name}".encode())
        eventually(lambda: health.problem() is None, within_s=WITHIN_S, what="an open database")
        keeper.verify()
        write(engine)
        StoreQueries(engine).request("nobody")
        keeper.close()
        with engine.connect() as connection:
            running = text("SELECT count(*) FROM agents WHERE stopped_at IS NULL")
            assert connection.execute(running).scalar_one() == 0
        engine.dispose()
        server.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.mark.parametrize("gone", [("-wal",), ("-wal", "-shm"), ("", "-wal", "-shm")])
def test_a_file_is_opened_anew_when_the_last_user_of_the_old_one_has_ended(
    tmp_path: Path, gone: Sequence[str]
) -> None:
    file = tmp_path / "goodput.db"
    with kept(f"sqlite:///{file}") as (keeper, engine, health):
        # The next user needs a new connection.
        engine.dispose()
        with engine.connect() as user:
            user.execute(text("SELECT count(*) FROM agents"))
            for ending in gone:
                Path(f"{file}{ending}").unlink()
            # A connection that would make a new log beside the old one.
            with pytest.raises(StoreUnavailable):
                write(engine)
            eventually(health.problem, within_s=WITHIN_S, what="a closed database")
            for _ in range(3):
                with pytest.raises(StoreUnavailable, match="deleted or replaced"):
                    write(engine)
        eventually(lambda: health.problem() is None, within_s=WITHIN_S, what="an open database")
        in_transaction(
            for_writing(engine),
            lambda connection: connection.execute(text("UPDATE agents SET version = 'new'")),
        )
        keeper.verify()
        with closing(sqlite3.connect(file, timeout=30)) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert database.execute("SELECT version FROM agents").fetchall() == [("new",)]
