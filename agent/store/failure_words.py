"""Why a database refused, in words that anybody may read: they name no host and no user."""

import sqlite3
from collections.abc import Mapping

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolExhausted

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
    by_driver = getattr(error, "orig", None)
    state = getattr(by_driver, "sqlstate", None)
    if state:
        return _OF_POSTGRES.get(state, _OF_POSTGRES.get(state[:2]))
    # The driver of ClickHouse is used without SQLAlchemy, too.
    number = getattr(by_driver or error, "code", None)
    if isinstance(number, int):
        return _OF_CLICKHOUSE.get(number)
    lost = isinstance(error, SQLAlchemyError) and by_driver is not None
    return "the database cannot be reached" if lost else None
