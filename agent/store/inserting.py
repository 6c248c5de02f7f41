"""Inserts each request once, however often it is sent, at the speed of the driver."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

from sqlalchemy import BigInteger, Boolean, Connection, DateTime, Float, Integer, String, Text, text

from agent.records.objective import JudgedRequest
from agent.records.request import RequestRecord, Vantage
from agent.store.rows import (
    ALL_COLUMNS,
    COLUMNS,
    SettlesAt,
    all_postgres_columns,
    all_sqlite_rows,
    postgres_columns,
    sqlite_rows,
)
from agent.store.tables import requests

Key = tuple[str, str]


# A stored span has a row of its own or is part of a joined row: any conflict means stored.
_ONCE = "ON CONFLICT DO NOTHING"
# PostgreSQL's keys hold for one time only, and the joined row may begin at another. Only the days
# around are looked at.
_STORED = (
    "SELECT FROM requests AS stored WHERE stored.trace_id = new.trace_id "
    "AND (stored.span_id = new.span_id OR stored.proxy_span_id = new.{proxy_span_id}) "
    "AND stored.started_at BETWEEN new.started_at - interval '1 day' "
    "AND new.started_at + interval '1 day'"
)


# The driver releases Python's lock while a statement runs. To get it back from a thread that
# computes takes up to a switch interval, so a statement for each row would take ten times as long.
_ROWS_PER_STATEMENT = 25


@cache
def sqlite_insert(columns: tuple[str, ...], rows: int) -> str:
    """The INSERT statement for a number of rows; it leaves out rows that are stored already."""
    places = f"({', '.join('?' * len(columns))})"
    return (
        f"INSERT INTO requests ({', '.join(columns)}) VALUES {', '.join([places] * rows)} {_ONCE}"
    )


# The first match counts: Text and BigInteger are subclasses of String and Integer.
_POSTGRES_TYPES = (
    (Text, "text"),
    (String, "text"),
    (BigInteger, "bigint"),
    (Integer, "integer"),
    (Float, "double precision"),
    (Boolean, "boolean"),
    (DateTime, "timestamptz"),
)


def _postgres_type(column: str) -> str:
    kind = requests.c[column].type
    implementation = getattr(kind, "impl_instance", kind)
    return next(name for cls, name in _POSTGRES_TYPES if isinstance(implementation, cls))


def _postgres_insert(columns: Sequence[str]) -> str:
    arrays = ", ".join(f"%s::{_postgres_type(column)}[]" for column in columns)
    names = ", ".join(columns)
    proxy_span_id = "proxy_span_id" if "proxy_span_id" in columns else "span_id"
    stored = _STORED.format(proxy_span_id=proxy_span_id)
    return (
        f"INSERT INTO requests ({names}) SELECT * FROM unnest({arrays}) AS new ({names}) "
        f"WHERE NOT EXISTS ({stored}) {_ONCE} RETURNING trace_id, span_id"
    )


_POSTGRES_INSERT = _postgres_insert(COLUMNS)
_POSTGRES_INSERT_ALL = _postgres_insert(ALL_COLUMNS)


def key_of(item: JudgedRequest) -> Key:
    """The identity of a span."""
    return (item.record.trace_id, item.record.span_id)


def at_once(_record: RequestRecord) -> None:
    """The `settles_at` of a writer without joining: no view waits."""


def insert_new(
    connection: Connection, judged: Sequence[JudgedRequest], settles_at: SettlesAt = at_once
) -> list[JudgedRequest]:
    """Insert requests that are not stored yet; returns these, each span once.

    A view for which `settles_at` gives a time is stored as waiting, not counted.
    """
    unique = {key_of(item): item for item in judged}
    if not unique:
        return []
    inserted = _INSERTERS[connection.dialect.name](connection, list(unique.values()), settles_at)
    if inserted is None:
        return list(unique.values())
    return [item for key, item in unique.items() if key in inserted]


def _is_plain(judged: Sequence[JudgedRequest], settles_at: SettlesAt) -> bool:
    """Whether all are engines' views that do not wait: most columns are then left out."""
    engine = Vantage.ENGINE
    if not all([item.record.vantage is engine for item in judged]):
        return False
    return settles_at is at_once or all(settles_at(item.record) is None for item in judged)


def _insert_sqlite(
    connection: Connection, judged: Sequence[JudgedRequest], settles_at: SettlesAt
) -> set[Key] | None:
    """The new keys, or None where all were new."""
    newest = connection.execute(text("SELECT coalesce(max(id), 0) FROM requests")).scalar_one()
    if _is_plain(judged, settles_at):
        inserted = _insert_rows(connection, COLUMNS, sqlite_rows(judged))
    else:
        inserted = _insert_rows(connection, ALL_COLUMNS, all_sqlite_rows(judged, settles_at))
    if inserted == len(judged):
        return None
    # No one else writes during this transaction, so higher numbers are this insert's.
    stored = connection.execute(
        text("SELECT trace_id, span_id FROM requests WHERE id > :newest"), {"newest": newest}
    )
    return {(trace_id, span_id) for trace_id, span_id in stored}


def _insert_rows(
    connection: Connection, columns: tuple[str, ...], rows: Sequence[tuple[Any, ...]]
) -> int:
    """Insert rows into SQLite; returns how many of them were not stored yet."""
    whole = len(rows) - len(rows) % _ROWS_PER_STATEMENT
    groups = [
        _joined(rows[first : first + _ROWS_PER_STATEMENT])
        for first in range(0, whole, _ROWS_PER_STATEMENT)
    ]
    parts = {_ROWS_PER_STATEMENT: groups, len(rows) - whole: [_joined(rows[whole:])]}
    return sum(
        connection.exec_driver_sql(sqlite_insert(columns, number), given).rowcount
        for number, given in parts.items()
        if number and given
    )


def _joined(rows: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(chain.from_iterable(rows))


def _insert_postgres(
    connection: Connection, judged: Sequence[JudgedRequest], settles_at: SettlesAt
) -> set[Key] | None:
    # All writers insert in one order: two that wait for each other's rows would deadlock.
    ordered = sorted(judged, key=key_of)
    if _is_plain(ordered, settles_at):
        statement, columns = _POSTGRES_INSERT, postgres_columns(ordered)
    else:
        statement, columns = _POSTGRES_INSERT_ALL, all_postgres_columns(ordered, settles_at)
    rows = connection.exec_driver_sql(statement, tuple(columns))
    return {(trace_id, span_id) for trace_id, span_id in rows}


_INSERTERS: Mapping[
    str, Callable[[Connection, Sequence[JudgedRequest], SettlesAt], set[Key] | None]
] = {
    "sqlite": _insert_sqlite,
    "postgresql": _insert_postgres,
}
