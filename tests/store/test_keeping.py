"""A file that cannot be opened at first, or goes away: who uses it, and what they are told."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from agent.errors import StoreUnavailable
from agent.store import keeping
from agent.store.claim import NameClaim, own_instance
from agent.store.connection import for_writing, in_transaction, open_engine
from agent.store.health import StoreHealth
from agent.store.keeping import StoreKeeper
from agent.store.store_queries import StoreQueries
from agent.store.time_limits import open_query_engine
from tests.real_parts.waiting import eventually

WITHIN_S = 60.0


def _read(engine: Engine) -> None:
    StoreQueries(engine).request("nobody")


@pytest.fixture(autouse=True)
def opening_is_tried_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "TRY_EVERY_S", 0.05)


@contextmanager
def kept(file: Path, agent: str = "chat") -> Iterator[tuple[StoreKeeper, Engine, StoreHealth]]:
    url = f"sqlite:///{file}"
    engine, queries, health = open_engine(url), open_query_engine(url, 10.0), StoreHealth()
    keeper = StoreKeeper(
        file,
        [engine, queries],
        claim=NameClaim(agent, own_instance()),
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
        keeper.release()


def write(engine: Engine) -> None:
    in_transaction(engine, lambda connection: connection.execute(text("SELECT 1")))


def test_a_file_whose_folder_is_made_later_is_opened_and_nobody_learns_where_it_is(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "s3cret"
    with kept(folder / "goodput.db") as (keeper, engine, health):
        problem = health.problem()
        assert problem is not None
        with pytest.raises(StoreUnavailable) as refused:
            write(engine)
        with pytest.raises(StoreUnavailable, match="cannot be opened"):
            keeper.verify()
        for said in (problem, refused.value.public):
            assert "cannot be opened" in said
            assert "s3cret" not in said
        folder.mkdir()
        eventually(lambda: health.problem() is None, within_s=WITHIN_S, what="an open database")
        keeper.verify()
        write(engine)
        StoreQueries(engine).request("nobody")
        keeper.close()
        with engine.connect() as connection:
            running = text("SELECT count(*) FROM agents WHERE stopped_at IS NULL")
            assert connection.execute(running).scalar_one() == 0


def test_a_second_agent_has_the_file_when_the_first_one_has_released_it(tmp_path: Path) -> None:
    """Also if they have different names."""
    file = tmp_path / "goodput.db"
    with (
        kept(file) as (first, engine, _),
        kept(file, "batch") as (second, of_second, health),
    ):
        assert "another agent writes to goodput.db" in str(health.problem())
        with pytest.raises(StoreUnavailable, match=r"a `storage\.file` of its own"):
            write(of_second)
        write(engine)
        first.close()
        engine.dispose()
        first.release()
        eventually(lambda: health.problem() is None, within_s=WITHIN_S, what="an open database")
        second.verify()
        write(of_second)


@pytest.mark.parametrize("gone", [("-wal",), ("-wal", "-shm"), ("", "-wal", "-shm")])
def test_a_file_is_opened_anew_when_the_last_user_of_the_old_one_has_ended(
    tmp_path: Path, gone: Sequence[str]
) -> None:
    file = tmp_path / "goodput.db"
    with kept(file) as (keeper, engine, health):
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
