"""Files of a database: one agent has each; they may go away, and come back."""

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, make_url, text

from agent.errors import StoreUnavailable
from agent.store import keeping
from agent.store.claim import NameClaim, own_instance
from agent.store.connection import for_writing, in_transaction, open_engine
from agent.store.health import StoreHealth
from agent.store.keeping import StoreKeeper
from agent.store.sqlite_place import FileLock, SqlitePlace, set_aside, sqlite_path
from agent.store.store_queries import StoreQueries
from agent.store.time_limits import open_query_engine
from tests.real_parts.waiting import eventually


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "goodput.db"


@pytest.fixture
def place(file: Path) -> Iterator[SqlitePlace]:
    opened = SqlitePlace(file, 1.0)
    yield opened
    opened.close()


def insert_value(file: Path, value: int) -> None:
    with closing(sqlite3.connect(file, isolation_level=None)) as database:
        database.execute("CREATE TABLE IF NOT EXISTS t (value)")
        database.execute("INSERT INTO t VALUES (?)", (value,))


def values(file: Path) -> list[int]:
    with closing(sqlite3.connect(file)) as database:
        return [value for (value,) in database.execute("SELECT value FROM t ORDER BY value")]


def test_the_place_holds_while_others_write_checkpoint_and_close(
    file: Path, place: SqlitePlace
) -> None:
    for value in range(5):
        insert_value(file, value)
        with closing(sqlite3.connect(file)) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert place.holds()
    assert values(file) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("ending", ["", "-wal", "-shm"])
@pytest.mark.parametrize("change", [os.unlink, lambda path: os.replace(path, f"{path}.away")])
def test_a_file_that_is_gone_is_noticed(
    file: Path, place: SqlitePlace, ending: str, change: Callable[[str], None]
) -> None:
    change(f"{file}{ending}")
    assert not place.holds()


def test_a_file_that_was_replaced_by_an_equal_one_is_noticed(
    file: Path, place: SqlitePlace
) -> None:
    copy = file.with_name("copy.db")
    copy.write_bytes(file.read_bytes())
    copy.replace(file)
    assert not place.holds()


def test_a_restored_file_gets_nothing_of_the_log_of_the_one_before(
    file: Path, place: SqlitePlace
) -> None:
    insert_value(file, 1)
    backup = file.with_name("backup.db")
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(backup)) as copy:
        source.backup(copy)
    insert_value(file, 2)
    backup.replace(file)
    assert place.leave()
    again = SqlitePlace(file, 1.0)
    assert values(file) == [1]
    again.close()


def test_a_log_that_came_with_the_new_file_stays(file: Path, place: SqlitePlace) -> None:
    new = file.with_name("new.db")
    opened = SqlitePlace(new, 1.0)
    insert_value(new, 7)
    for ending in ("", "-wal", "-shm"):
        os.replace(f"{new}{ending}", f"{file}{ending}")
    assert not place.leave()
    # As after a crash of whoever wrote it: only the log has the row.
    assert values(file) == [7]
    opened.close()


def test_files_that_are_set_aside_keep_their_bytes(file: Path, place: SqlitePlace) -> None:
    insert_value(file, 1)
    moved = set_aside(file)
    assert not file.exists()
    assert moved.name.startswith("goodput.db.corrupt-")
    assert values(moved) == [1]


def test_only_a_plain_path_of_sqlite_can_be_compared(tmp_path: Path) -> None:
    assert sqlite_path(make_url(f"sqlite:///{tmp_path}/a.db")) == tmp_path / "a.db"
    assert sqlite_path(make_url("sqlite:///file:a.db?uri=true")) is None
    assert sqlite_path(make_url("postgresql://u@h/a")) is None


def test_of_two_agents_one_has_the_file_until_it_releases_it(file: Path) -> None:
    first, second = FileLock(file), FileLock(file)
    first.take()
    for _ in range(2):
        with pytest.raises(
            StoreUnavailable, match=r"another agent writes to goodput\.db"
        ) as refused:
            second.take()
        assert str(file.parent) not in refused.value.public
    first.release()
    second.take()
    with pytest.raises(StoreUnavailable):
        first.take()
    second.release()


def test_an_agent_that_opens_its_file_again_still_has_it(file: Path) -> None:
    lock = FileLock(file)
    lock.take()
    lock.take()
    with pytest.raises(StoreUnavailable):
        FileLock(file).take()
    for _ in range(2):
        lock.release()
    other = FileLock(file)
    other.take()
    other.release()


def test_a_file_that_is_set_aside_and_its_successor_have_one_lock(
    file: Path, place: SqlitePlace
) -> None:
    lock = FileLock(file)
    lock.take()
    set_aside(file)
    with pytest.raises(StoreUnavailable):
        FileLock(file).take()
    lock.release()


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
