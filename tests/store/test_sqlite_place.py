"""Files of a database: one agent at a time has them; they may go while they are open."""

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import make_url

from agent.errors import StoreUnavailable
from agent.store.sqlite_place import FileLock, SqlitePlace, set_aside, sqlite_path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "goodput.db"


@pytest.fixture
def place(file: Path) -> Iterator[SqlitePlace]:
    opened = SqlitePlace(file, 1.0)
    yield opened
    opened.close()


def write(file: Path, value: int) -> None:
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
        write(file, value)
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
    write(file, 1)
    backup = file.with_name("backup.db")
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(backup)) as copy:
        source.backup(copy)
    write(file, 2)
    backup.replace(file)
    assert place.leave()
    again = SqlitePlace(file, 1.0)
    assert values(file) == [1]
    again.close()


def test_a_log_that_came_with_the_new_file_stays(file: Path, place: SqlitePlace) -> None:
    new = file.with_name("new.db")
    opened = SqlitePlace(new, 1.0)
    write(new, 7)
    for ending in ("", "-wal", "-shm"):
        os.replace(f"{new}{ending}", f"{file}{ending}")
    assert not place.leave()
    # As after a crash of whoever wrote it: only the log has the row.
    assert values(file) == [7]
    opened.close()


def test_files_that_are_set_aside_keep_their_bytes(file: Path, place: SqlitePlace) -> None:
    write(file, 1)
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


def test_agents_with_a_file_each_do_not_wait_for_each_other(file: Path) -> None:
    locks = [FileLock(file), FileLock(file.with_name("other.db"))]
    for lock in locks:
        lock.take()
    for lock in locks:
        lock.release()
