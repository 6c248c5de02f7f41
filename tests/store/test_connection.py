"""Connections to each kind of database: what they wait for, and the size of what they reach."""

import shutil
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import Engine, event, select, text
from sqlalchemy.exc import OperationalError

from agent.errors import SettingsInvalid, StoreUnavailable
from agent.store import connection as connections
from agent.store import sqlite_connection
from agent.store.claim import NameClaim, own_instance
from agent.store.connection import for_polling, for_writing, open_engine
from agent.store.migrating import upgrade
from agent.store.observations import ObservationStore
from agent.store.sqlite_connection import checkpoints, without_disk_waits
from agent.store.stored_queries import database_bytes
from agent.store.tables import requests
from tests.store.making import (
    NOON,
    engine_sample,
    gpu_sample,
    restart,
    some,
    store,
)
from tests.store.migrated import migrated


def test_commits_to_a_log_wait_for_the_disk_unless_they_need_not(sqlite: Engine) -> None:
    def modes() -> list[tuple[Any, ...]]:
        with sqlite.connect() as first, sqlite.connect() as second:
            return [
                tuple(
                    each.scalar(text(f"PRAGMA {name}")) for name in ("journal_mode", "synchronous")
                )
                for each in (first, second)
            ]

    normal, full = 1, 2
    assert modes() == [("wal", full)] * 2
    without_disk_waits(sqlite)
    assert modes() == [("wal", normal)] * 2


def test_a_write_has_room_for_all_its_pages_and_gives_it_back(sqlite: Engine) -> None:
    """Pages that do not fit are written twice."""

    def room_kib() -> set[int]:
        with sqlite.connect() as first, sqlite.connect() as second:
            rooms = [
                each.execute(text("PRAGMA cache_size")).scalar_one() for each in (first, second)
            ]
        return {-int(room) for room in rooms}

    usual = room_kib()
    with for_writing(sqlite).begin() as connection:
        writing = -int(connection.execute(text("PRAGMA cache_size")).scalar_one())
    assert writing > 2 * max(usual)
    assert room_kib() == usual


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    other = sqlite3.connect(tmp_path / "goodput.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    yield other
    other.close()


def test_a_locked_file_is_switched_to_wal_when_its_lock_ends(
    tmp_path: Path, foreign: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example when two agents open a new file at once."""
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            foreign.execute("COMMIT")

    monkeypatch.setattr(sqlite_connection, "sleep", wait)
    engine = open_engine(f"sqlite:///{tmp_path / 'goodput.db'}")
    with engine.connect() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar_one() == "wal"
    engine.dispose()
    assert len(waits) == 3


@pytest.mark.usefixtures("foreign")
def test_a_file_that_stays_locked_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_connection, "_WAIT_S", 0.05)
    engine = open_engine(f"sqlite:///{tmp_path / 'goodput.db'}")
    with pytest.raises(StoreUnavailable, match="database is locked"):
        upgrade(engine)
    engine.dispose()


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_each_name_of_postgresql_in_a_url_is_accepted(
    emptied_postgres_url: str, scheme: str
) -> None:
    engine = open_engine(emptied_postgres_url.replace("postgresql+psycopg", scheme, 1))
    with engine.connect() as connection:
        assert connection.execute(text("SHOW server_version_num")).scalar_one() >= "150000"
    engine.dispose()


def writes_of_polls(observations: ObservationStore) -> list[Callable[[], None]]:
    return [
        lambda: observations.write_engine_sample(engine_sample(NOON)),
        lambda: observations.write_event(restart(NOON)),
        lambda: observations.write_gpu_samples([gpu_sample(NOON)]),
    ]


def test_a_poll_does_not_wait_for_a_locked_file_but_folding_does(
    sqlite: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_connection, "POLLING_WAIT_S", 0.05)
    observations = ObservationStore(sqlite, "agent-0")
    with for_writing(sqlite).begin():
        for write in writes_of_polls(observations):
            with pytest.raises(StoreUnavailable, match="database is locked"):
                write()
    for write in writes_of_polls(observations):
        write()
    for engine, wait_ms in ((for_polling(sqlite), 50), (for_writing(sqlite), 10_000)):
        with engine.begin() as connection:
            left_ms = connection.execute(text("PRAGMA busy_timeout")).scalar_one()
            assert wait_ms / 100 < left_ms <= wait_ms


def test_a_heartbeat_does_not_wait_for_a_table_lock_but_upkeep_does(
    postgres: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "POLLING_WAIT_S", 0.05)
    claim = NameClaim("chat", own_instance())
    claim.take(postgres)
    with postgres.begin() as other:
        other.execute(text("LOCK TABLE agents"))
        with pytest.raises(StoreUnavailable, match="statement timeout"):
            claim.beat(postgres)
    claim.beat(postgres)
    for patient in (postgres, for_writing(postgres)):
        with patient.begin() as connection:
            assert connection.execute(text("SHOW statement_timeout")).scalar_one() == "0"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "is no database URL"),
        ("goodput.db", "is no database URL"),
        ("postgresql://agent@db:port/goodput", "is no database URL"),
        ("mysql://agent@db/goodput", "'mysql' is not supported; use sqlite, postgresql or"),
        ("sqlite+aiosqlite:///goodput.db", "is not supported; use sqlite, postgresql or"),
        ("sqlite://", "SQLite needs a file"),
        ("sqlite:///:memory:", "SQLite needs a file"),
        ("postgresql://agent:hunter@2@db:port/goodput", "db:port/goodput"),
    ],
)
def test_a_url_of_an_unknown_database_is_refused(url: str, message: str) -> None:
    with pytest.raises(SettingsInvalid) as refused:
        open_engine(url)
    assert message in str(refused.value)
    assert "hunter" not in str(refused.value)


def test_the_folder_of_the_file_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "größe 100%"
    folder.mkdir()
    engine = open_engine(f"sqlite:///{folder / 'goodput.db'}")
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
    engine.dispose()
    assert (folder / "goodput.db").exists()


def test_writers_of_one_program_never_wait_for_the_lock_of_sqlite(sqlite: Engine) -> None:
    """SQLite's own wait sleeps up to 0.1 s past the end of a lock."""
    open_at_once, begun = 0, []

    def begins(_connection: object, _cursor: object, statement: str, *_more: object) -> None:
        nonlocal open_at_once
        if statement == "BEGIN IMMEDIATE":
            open_at_once += 1
            begun.append(open_at_once)

    def ends(_connection: object) -> None:
        nonlocal open_at_once
        open_at_once -= 1

    event.listen(sqlite, "before_cursor_execute", begins)
    event.listen(sqlite, "commit", ends)

    def write(number: int) -> None:
        for _ in range(20):
            with for_writing(sqlite).begin() as connection:
                connection.execute(text(f"UPDATE requests SET http_status = {number}"))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert begun == [1] * 80


def test_a_writer_that_could_not_begin_keeps_no_other_waiting(
    sqlite: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_connection, "POLLING_WAIT_S", 0.05)
    other = sqlite3.connect(str(sqlite.url.database), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(OperationalError, match="locked"), for_polling(sqlite).begin():
        pass
    other.close()
    with for_polling(sqlite).begin() as connection:
        connection.execute(text("UPDATE requests SET http_status = 1"))


def test_a_writer_that_lost_its_connection_keeps_no_other_waiting(
    sqlite: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_connection, "POLLING_WAIT_S", 0.05)
    with for_writing(sqlite).connect() as lost:
        lost.execute(text("UPDATE requests SET http_status = 1"))
        lost.invalidate()
    with for_polling(sqlite).begin() as connection:
        connection.execute(text("UPDATE requests SET http_status = 1"))


def rows_without_log(engine: Engine, folder: Path) -> int:
    shutil.copy(str(engine.url.database), folder / "file-alone.db")
    with closing(sqlite3.connect(folder / "file-alone.db")) as alone:
        (rows,) = alone.execute("SELECT count(*) FROM requests").fetchone()
    return int(rows)


def test_between_commits_the_log_is_written_into_the_file_at_most_twice_a_second(
    sqlite: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(sqlite_connection, "monotonic", lambda: now)
    checkpoint = checkpoints(sqlite)
    checkpoint()
    store(sqlite, some(range(5)))
    checkpoint()
    assert rows_without_log(sqlite, tmp_path) == 0
    now += 0.5
    checkpoint()
    assert rows_without_log(sqlite, tmp_path) == 5


def test_a_commit_writes_only_a_very_long_log_into_the_file(sqlite: Engine, tmp_path: Path) -> None:
    checkpoints(sqlite)()
    # 1,000 pages, which is where SQLite itself would begin, are 4 MB.
    store(sqlite, some(range(12_000)))
    assert Path(f"{sqlite.url.database}-wal").stat().st_size > 5_000_000
    assert rows_without_log(sqlite, tmp_path) == 0


def test_a_log_that_cannot_be_written_into_its_file_is_logged_once_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(sqlite_connection, "monotonic", lambda: now)
    checkpoint = checkpoints(open_engine(f"sqlite:///{tmp_path / 'missing' / 'goodput.db'}"))
    sentence = "the log of the database was not written into its file"
    for later_s, logged in ((0.0, 1), (59.0, 1), (1.0, 2)):
        now += later_s
        checkpoint()
        assert caplog.text.count(sentence) == logged


def test_statements_with_lists_of_any_length_leave_no_memory_behind(sqlite: Engine) -> None:
    """Each length makes a statement of its own, of almost a megabyte."""
    process = psutil.Process()
    with sqlite.connect() as connection:
        ids = list(range(5000))
        _ = connection.execute(select(requests.c.id).where(requests.c.id.in_(ids))).all()
        before = process.memory_info().rss
        for shorter in range(1, 60):
            some = select(requests.c.id).where(requests.c.id.in_(ids[:-shorter]))
            assert connection.execute(some).all() == []
        assert process.memory_info().rss - before < 20_000_000


@pytest.mark.parametrize(
    ("extra", "driver", "url"),
    [
        ("clickhouse", "clickhouse_connect", "clickhousedb://agent:s3cret@db:8123/goodput"),
        ("postgres", "psycopg", "postgresql://agent:s3cret@db/goodput"),
    ],
)
def test_the_driver_of_a_shared_database_is_an_extra(
    extra: str, driver: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None is a module that cannot be imported.
    monkeypatch.setitem(sys.modules, driver, None)
    with pytest.raises(SettingsInvalid) as refusal:
        open_engine(url)
    assert f"pip install goodput-agent[{extra}]" in str(refusal.value)
    assert "s3cret" not in str(refusal.value)


def test_a_database_grows_by_what_is_stored(new_url: str) -> None:
    with migrated(new_url) as engine:
        before = database_bytes(engine)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE filler (content TEXT)"))
            connection.execute(text("INSERT INTO filler VALUES (:c)"), {"c": "x" * 200})
            for _ in range(12):
                connection.execute(text("INSERT INTO filler SELECT content FROM filler"))
        after = database_bytes(engine)
    assert before is not None
    assert after is not None
    # 4,096 rows of 200 bytes.
    assert 800_000 < after - before < 4_000_000


def test_clickhouse_has_the_size_of_the_databases_own_tables(clickhouse_url: str) -> None:
    engine = open_engine(clickhouse_url)
    with engine.connect() as connection:
        connection.execute(text("CREATE TABLE filler (n UInt64) ENGINE = MergeTree ORDER BY n"))
        before = database_bytes(engine)
        connection.execute(text("INSERT INTO filler SELECT rand64() FROM numbers(10000)"))
    assert before == 0
    # 10,000 numbers that cannot be compressed.
    assert 80_000 < (database_bytes(engine) or 0) < 100_000
    engine.dispose()


def test_the_log_of_sqlite_is_a_part_of_it(tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path / 'a.db'}")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE a (b)"))
    files = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(files) == 3
    assert database_bytes(engine) == sum(files)
    engine.dispose()
