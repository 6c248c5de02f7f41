"""Inserts each request once, however often it is sent, at the speed of the driver."""

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

from sqlalchemy import Connection, text

from agent.records.objective import JudgedRequest
from agent.records.request import RequestRecord, Vantage
from agent.store.rows import ALL_COLUMNS, COLUMNS, SettlesAt, all_sqlite_rows, sqlite_rows
from agent.store.sqlite_connection import ROWS_PER_NUMBER, number_next
from agent.store.tables import CHANGED

Key = tuple[str, str]


# The driver releases Python's lock while a statement runs. To get it back from a thread that
# computes takes up to a switch interval, so a statement for each row would take ten times as long.
_ROWS_PER_STATEMENT = 25


@cache
def sqlite_insert(columns: tuple[str, ...], rows: int) -> str:
    """The INSERT statement for a number of rows; it leaves out rows that are stored already."""
    values = f"({', '.join('?' * len(columns))}, {CHANGED})"
    # A stored span has a row of its own or is part of a joined row: any conflict means stored.
    return (
        f"INSERT INTO requests ({', '.join(columns)}, changed) "
        f"VALUES {', '.join([values] * rows)} ON CONFLICT DO NOTHING"
    )


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
    inserted = _inserted(connection, list(unique.values()), settles_at)
    if inserted is None:
        return list(unique.values())
    return [item for key, item in unique.items() if key in inserted]


def _is_plain(judged: Sequence[JudgedRequest], settles_at: SettlesAt) -> bool:
    """Whether all are engines' views that do not wait: most columns are then left out."""
    engine = Vantage.ENGINE
    if not all([item.record.vantage is engine and not item.record.hop for item in judged]):
        return False
    return settles_at is at_once or all(settles_at(item.record) is None for item in judged)


def _inserted(
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
    inserted = 0
    for first in range(0, len(rows), ROWS_PER_NUMBER):
        if first:
            number_next(connection)
        inserted += _insert_some(connection, columns, rows[first : first + ROWS_PER_NUMBER])
    return inserted


def _insert_some(
    connection: Connection, columns: tuple[str, ...], rows: Sequence[tuple[Any, ...]]
) -> int:
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
