"""Connections to SQLite: a lock of writers, numbered transactions, a write-ahead log."""

import logging
import sqlite3
import threading
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from time import monotonic, sleep
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.exc import SQLAlchemyError

from agent.errors import SettingsInvalid, StoreUnavailable
from agent.store.sqlite_place import create_private, sqlite_path

_LOG = logging.getLogger(__name__)

# How long a transaction waits for the lock of writers; those of polls wait for less.
_WAIT_S, POLLING_WAIT_S = 10.0, 5.0
_RETRY_S = 0.01
# A commit after which the log is longer than this writes the log into the file.
_LONG_LOG_PAGES = 16_384
# Pages that a transaction changes are written twice where they do not fit. Rows with random keys
# change 4 MB for 250 of them. Between transactions a connection keeps no more than by default.
_WRITING_CACHE_KIB, _CACHE_KIB = 8_000, 2_000
_CHECKPOINT_EVERY_S = 0.5
_CHECKPOINT_AFTER_FAILURE_S = 60.0
# A transaction that writes more rows takes a further number.
ROWS_PER_NUMBER = 500
# Marks a connection whose thread holds its engine's lock of writers.
_HOLDS_LOCK = "holds_writers_lock"


class SqliteConnection(sqlite3.Connection):
    """Knows when its close is over: SQLite writes and deletes files until then."""

    closed = False

    def close(self) -> None:
        """Close the connection."""
        super().close()
        self.closed = True


def open_sqlite(url: URL, pool: Mapping[str, Any]) -> Engine:
    """An engine for a file; `pool` as for `open_engine`. Raises SettingsInvalid without one."""
    if url.database in (None, "", ":memory:"):
        # In memory, every thread would have a database of its own.
        raise SettingsInvalid(["SQLite needs a file, as in sqlite:///goodput.db"])
    # By default the driver keeps 128 statements of each connection. A statement with a list of
    # values takes up to a megabyte, and is only used again for a list of the same length.
    connect = {"timeout": _WAIT_S, "cached_statements": 0, "factory": SqliteConnection}
    engine = create_engine(url, connect_args=connect, pool_size=8, **pool)
    path = sqlite_path(url)
    if path is not None:
        event.listen(engine, "do_connect", lambda *_: create_private(path))
    event.listen(engine, "connect", _prepare)
    # SQLite's own wait sleeps up to 0.1 s past the end of a lock.
    writing = threading.Lock()
    event.listen(engine, "begin", partial(_begin, writing))
    event.listen(engine, "checkin", partial(_end, writing))
    return engine


def _prepare(connection: sqlite3.Connection, _record: object) -> None:
    # The driver begins transactions late and never around DDL; `_begin` begins them here.
    connection.isolation_level = None
    # A text that is not UTF-8 would end a query of many rows.
    connection.text_factory = partial(str, encoding="utf-8", errors="replace")
    _write_ahead(connection)
    # What was acknowledged must survive a power cut, so every commit waits for the disk.
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute(f"PRAGMA wal_autocheckpoint={_LONG_LOG_PAGES}").close()


def without_disk_waits(engine: Engine) -> None:
    """Make commits of SQLite not wait for the disk: a power cut may take the newest commits."""
    if engine.dialect.name == "sqlite":
        pragma = "PRAGMA synchronous=NORMAL"
        event.listen(engine, "connect", lambda connection, _record: connection.execute(pragma))
        engine.dispose()


def checkpoints(engine: Engine) -> Callable[[], None]:
    """A function that writes SQLite's log into its file, at most twice a second.

    Called between commits, it relieves commits of this work. It pauses a minute after a failure.
    """
    due_at = 0.0

    def checkpoint() -> None:
        nonlocal due_at
        if engine.dialect.name != "sqlite" or monotonic() < due_at:
            return
        due_at = monotonic() + _CHECKPOINT_EVERY_S
        try:
            with closing(engine.raw_connection()) as connection:
                connection.cursor().execute("PRAGMA wal_checkpoint(PASSIVE)").close()
        except StoreUnavailable:
            return  # The database is not open, and its keeper has logged why.
        except (SQLAlchemyError, sqlite3.Error) as error:
            due_at = monotonic() + _CHECKPOINT_AFTER_FAILURE_S
            _LOG.warning("the log of the database was not written into its file: %s", error)

    return checkpoint


def empty_log(engine: Engine) -> None:
    """Write SQLite's log into its file and cut it to nothing, as far as no query still reads it."""
    if engine.dialect.name != "sqlite":
        return
    try:
        with closing(engine.raw_connection()) as connection:
            connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
    except StoreUnavailable:
        return  # The database is not open, and its keeper has logged why.
    except (SQLAlchemyError, sqlite3.Error) as error:
        _LOG.warning("the log of the database was not written into its file: %s", error)


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch the file to write-ahead logging. SQLite's own time-out does not cover this pragma."""
    deadline = monotonic() + _WAIT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or monotonic() > deadline:
                raise
        else:
            return
        sleep(_RETRY_S)


def _begin(writing: threading.Lock, connection: Any) -> None:
    options = connection.get_execution_options()
    writes = options.get("writes", False)
    # Connections are shared, so each transaction sets how long it waits.
    wait_s = POLLING_WAIT_S if options.get("polling", False) else _WAIT_S
    until = monotonic() + wait_s
    if writes and not connection.info.get(_HOLDS_LOCK, False):
        connection.info[_HOLDS_LOCK] = writing.acquire(timeout=wait_s)
        connection.exec_driver_sql(f"PRAGMA cache_size = -{_WRITING_CACHE_KIB}").close()
    left_ms = 1000 * max(until - monotonic(), 0.0)
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {left_ms:.0f}").close()
    # SQLite may refuse to write in a transaction that began with a read.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
    if options.get("numbered", False):
        number_next(connection)


def number_next(connection: Any) -> None:
    """Give what this transaction writes from here on the next number.

    A batch that is published ends with a number, so a slow server need not take all rows of a large
    transaction at once.
    """
    connection.exec_driver_sql("UPDATE publishing SET last = last + 1").close()


def _end(writing: threading.Lock, connection: Any, record: Any) -> None:
    holds_lock = record.info.pop(_HOLDS_LOCK, None)
    if holds_lock:
        writing.release()
    if holds_lock is not None and connection is not None:
        # A file that cannot be read is reported by the next transaction.
        with suppress(sqlite3.Error):
            connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}").close()
