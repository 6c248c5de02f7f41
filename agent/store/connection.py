"""Opens connections and transactions of the database: SQLite, PostgreSQL or ClickHouse."""

import logging
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, Select, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolExhausted

from agent.errors import QueryTooSlow, SettingsInvalid, StoreUnavailable
from agent.store.sqlite_connection import POLLING_WAIT_S, open_sqlite

# The primary result code of SQLite is the low byte of the extended one.
_PRIMARY = 0xFF

_OF_SQLITE: Mapping[int, str] = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_BUSY: "the database is locked by another writer",
    sqlite3.SQLITE_LOCKED: "the database is locked",
    sqlite3.SQLITE_READONLY: "the database is read-only",
    sqlite3.SQLITE_PERM: "the database's file may not be written",
    sqlite3.SQLITE_CANTOPEN: "the database's file cannot be opened",
    sqlite3.SQLITE_IOERR: "the disk reports an error",
    sqlite3.SQLITE_CORRUPT: "the database's file is corrupt",
    sqlite3.SQLITE_NOTADB: "the file is no database",
}

# PostgreSQL, Appendix A: classes have two characters.
_OF_POSTGRES: Mapping[str, str] = {
    "25006": "the database is read-only",
    "28": "the database refuses the agent's user",
    "3D": "the database does not exist",
    "42501": "the agent's user lacks a privilege",
    "53100": "the disk is full",
    "53300": "the database has no free connections",
    "53": "the database lacks resources",
    "57014": "a statement was cancelled: it waited for a lock, or took too long",
    "57": "the database is shutting down or starting",
    "55P03": "a lock was not available",
    "XX": "the database's files are corrupt",
}

# ClickHouse, src/Common/ErrorCodes.cpp.
_OF_CLICKHOUSE: Mapping[int, str] = {
    81: "the database does not exist",
    **dict.fromkeys((159, 160), "a statement took too long"),
    164: "the database is read-only",
    **dict.fromkeys((192, 193, 194, 516), "the database refuses the agent's user"),
    202: "the database has no free connections",
    **dict.fromkeys((241, 252), "the database lacks resources"),
    243: "the disk is full",
    497: "the agent's user lacks a privilege",
}

CORRUPT_CODES = frozenset((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB))


def sqlite_code(error: BaseException) -> int | None:
    """SQLite's primary result code of an error, or None."""
    code = getattr(getattr(error, "orig", None) or error, "sqlite_errorcode", None)
    return None if code is None else code & _PRIMARY


def in_words(error: BaseException) -> str | None:
    """Why the database refused; None where we have no words for it."""
    if isinstance(error, PoolExhausted):
        return "no connection is free"
    if (code := sqlite_code(error)) is not None:
        return _OF_SQLITE.get(code)
    # Drivers are used without SQLAlchemy, too.
    by_driver = getattr(error, "orig", None)
    state = getattr(by_driver or error, "sqlstate", None)
    if state:
        return _OF_POSTGRES.get(state, _OF_POSTGRES.get(state[:2]))
    number = getattr(by_driver or error, "code", None)
    if isinstance(number, int):
        return _OF_CLICKHOUSE.get(number)
    lost = isinstance(error, SQLAlchemyError) and by_driver is not None
    return "the database cannot be reached" if lost else None


_LOG = logging.getLogger(__name__)

_POSTGRES = "postgresql+psycopg"
_MISSING = "the driver of PostgreSQL is not installed; run `pip install goodput-agent[postgres]`"
# A server behind a broken network sends nothing, not even the end of the connection. Milliseconds
# for the user timeout, seconds for the others: libpq, "Parameter Key Words".
_POSTGRES_CONNECTION = {
    "connect_timeout": 5,
    "tcp_user_timeout": 10_000,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
}
# The server ends a transaction of an agent that hangs in it, and so frees its locks.
_IDLE_IN_TRANSACTION_S = 60.0
# PostgreSQL, "Error Codes"; ClickHouse, src/Common/ErrorCodes.cpp.
_QUERY_CANCELED = "57014"
_TIMEOUT_CODES = (159, 160)
# Long results are read in parts of this many rows.
ROWS_PER_READ = 4096

STATEMENT_S = 30.0

_CREDENTIALS = re.compile(r"//.*@")


def open_engine(url: str, *, statement_s: float = STATEMENT_S, **pool: Any) -> Engine:
    """An engine for the URL; `pool` are SQLAlchemy's options of its pool of connections.

    ClickHouse ends a statement after `statement_s`; the others have limits elsewhere. Raises
    SettingsInvalid for another kind of database.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        shown = _CREDENTIALS.sub("//***@", url)
        raise SettingsInvalid([f"{shown!r} is no database URL: {error}"]) from error
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername=_POSTGRES)
    try:
        opener = _OPENERS[parsed.drivername]
        return opener(
            parsed, pool | ({"statement_s": statement_s} if opener is _open_clickhouse else {})
        )
    except (KeyError, NoSuchModuleError) as error:
        raise SettingsInvalid(
            [
                f"the database {parsed.drivername!r} is not supported; use sqlite, postgresql or "
                "clickhousedb"
            ]
        ) from error


def _open_postgres(url: URL, pool: Mapping[str, Any]) -> Engine:
    options = {"pool_size": 8, "pool_pre_ping": True, **pool}
    # Options in the URL win.
    connect = {name: value for name, value in _POSTGRES_CONNECTION.items() if name not in url.query}
    try:
        engine = create_engine(url, connect_args=connect, **options)
    except ImportError as error:
        raise SettingsInvalid([_MISSING]) from error
    event.listen(engine, "connect", _prepare_postgres)
    event.listen(engine, "begin", _begin_postgres)
    event.listen(engine, "before_cursor_execute", _fetch_binary)
    return engine


def _prepare_postgres(connection: Any, _record: object) -> None:
    limit_ms = round(_IDLE_IN_TRANSACTION_S * 1000)
    connection.execute(f"SET idle_in_transaction_session_timeout = {limit_ms}")
    connection.commit()


def _fetch_binary(*given: Any) -> None:
    """Fetch results in binary for a statement with the option `binary`: text is twice as long."""
    _connection, cursor, _statement, _parameters, context, _many = given
    if context.execution_options.get("binary", False):
        # Without PostgreSQL, its driver is not imported.
        cursor.format = context.dialect.dbapi.pq.Format.BINARY


def _begin_postgres(connection: Any) -> None:
    if connection.get_execution_options().get("polling", False):
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = {POLLING_WAIT_S * 1000:.0f}")


def _open_clickhouse(url: URL, options: Mapping[str, Any]) -> Engine:
    # The driver is there only with the extra `clickhouse`.
    from agent.store.clickhouse.connecting import open_clickhouse

    return open_clickhouse(url, **options)


_OPENERS = {
    "sqlite": open_sqlite,
    "sqlite+pysqlite": open_sqlite,
    _POSTGRES: _open_postgres,
    "clickhousedb": _open_clickhouse,
}


def for_writing(engine: Engine) -> Engine:
    """The same engine; its transactions take the write lock, and a number, at the start."""
    return engine.execution_options(writes=True, numbered=True)


def without_number(engine: Engine) -> Engine:
    """The same engine; what its transactions write is not published."""
    return engine.execution_options(numbered=False)


def for_polling(engine: Engine) -> Engine:
    """The same engine for small writes of polls: they wait POLLING_WAIT_S at most for a lock."""
    return for_writing(engine).execution_options(polling=True)


def for_reading(engine: Engine) -> Engine:
    """The same engine, each transaction reading one snapshot, as SQLite does by itself."""
    if engine.dialect.name == "postgresql":
        return engine.execution_options(isolation_level="REPEATABLE READ")
    return engine


def driver_message(error: Exception) -> str:
    """The driver's message, on one line and without the statement."""
    lines = str(getattr(error, "orig", None) or error).splitlines()
    return lines[0] if lines else type(error).__name__


_LOG_AGAIN_AFTER_S = 60.0
_logged_at: dict[str, float] = {}


def store_unavailable(sentence: str, error: Exception) -> StoreUnavailable:
    """A StoreUnavailable with a public sentence, and the driver's message for the log."""
    words = in_words(error)
    public = sentence if words is None else f"{sentence}: {words}"
    return StoreUnavailable(public, driver_message(error))


def logged_unavailable(sentence: str, error: Exception) -> StoreUnavailable:
    """The same for senders and readers; the driver's message is logged, at most once a minute."""
    made = store_unavailable(sentence, error)
    text, now = str(made), monotonic()
    if now - _logged_at.get(text, -_LOG_AGAIN_AFTER_S) >= _LOG_AGAIN_AFTER_S:
        _logged_at.clear()
        _logged_at[text] = now
        _LOG.warning("%s", text)
    return made


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A connection to read from. Raises StoreUnavailable."""
    try:
        with engine.connect() as connection:
            yield connection
    except SQLAlchemyError as error:
        if _is_interrupted(error):
            raise QueryTooSlow from error
        raise logged_unavailable("the database does not answer", error) from error


def _is_interrupted(error: SQLAlchemyError) -> bool:
    """Whether a statement was ended at its limit of time: see agent.store.time_limits."""
    by_driver = getattr(error, "orig", None)
    interrupted = getattr(by_driver, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT
    late = getattr(by_driver, "code", None) in _TIMEOUT_CODES
    return interrupted or late or getattr(by_driver, "sqlstate", None) == _QUERY_CANCELED


def read_all(engine: Engine, query: Select[Any]) -> Sequence[Any]:
    """All rows of a query. Raises StoreUnavailable."""
    with reading(engine) as connection:
        return connection.execute(query).all()


Result = TypeVar("Result")


def in_transaction(engine: Engine, work: Callable[[Connection], Result]) -> Result:
    """Run `work` in a transaction of its own; returns its result. Raises StoreUnavailable."""
    try:
        with engine.begin() as connection:
            return work(connection)
    except SQLAlchemyError as error:
        raise store_unavailable("the database did not take the write", error) from error
