"""The backlog of a journal: the notes that are not forwarded yet, with their rows as of now."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection

from agent.store.inserting import Key
from agent.store.journal.noting import (
    CAUSE_COLUMNS,
    CAUSE_DIFFERENCES,
    ROLLUP_COLUMNS,
    ROLLUP_DIFFERENCES,
)
from agent.store.tables import engine_minutes, engine_samples, events, gpu_samples, requests

Row = tuple[Any, ...]


def _columns(table: Any) -> tuple[str, ...]:
    return tuple(column.name for column in table.c if column.name != "id")


# The columns that are forwarded, by the table in the journal.
FORWARDED: Mapping[str, tuple[str, ...]] = {
    **{
        table.name: _columns(table)
        for table in (requests, engine_samples, gpu_samples, events, engine_minutes)
    },
    ROLLUP_DIFFERENCES: ROLLUP_COLUMNS,
    CAUSE_DIFFERENCES: CAUSE_COLUMNS,
}
_DIFFERENCES = (ROLLUP_DIFFERENCES, CAUSE_DIFFERENCES)

_NOTED = (
    "SELECT row FROM journal_notes WHERE of_table = ? AND number > ? AND number <= ? AND row > 0"
)
_CHANGED = f"{_NOTED} AND NOT fresh"


def _select(table: str, conditions: str, number: str = "") -> str:
    columns = ", ".join(FORWARDED[table])
    return f"SELECT {number}{columns} FROM {table} WHERE {conditions} ORDER BY rowid"


_SELECTS = {table: _select(table, f"rowid IN ({_NOTED})") for table in FORWARDED}
_NEW_REQUESTS = _select(
    requests.name, f"rowid IN ({_NOTED}) AND rowid NOT IN ({_CHANGED}) AND settles_at IS NULL"
)
_CHANGED_REQUESTS = _select(requests.name, f"rowid IN ({_CHANGED}) AND settles_at IS NULL")
_TABLES = "SELECT DISTINCT of_table FROM journal_notes WHERE number > ? AND number <= ?"
_LAST = (
    "SELECT count(*), max(number) FROM (SELECT number FROM journal_notes "
    "WHERE number > ? AND number < ? ORDER BY number LIMIT ?)"
)
_NUMBER_OF = "SELECT count(*) FROM journal_notes WHERE number > ? AND number <= ?"
# A key that was deleted may have a new row by now.
_GONE = (
    "SELECT DISTINCT trace_id, span_id FROM journal_notes AS note "
    "WHERE of_table = 'requests' AND row IS NULL AND number > ? AND number <= ? AND NOT EXISTS "
    "(SELECT 1 FROM requests WHERE requests.trace_id = note.trace_id "
    "AND requests.span_id = note.span_id)"
)
# The same with the start of each deleted row. A row that was moved to another start counts as
# deleted at its earlier start.
_GONE_AT = (
    "SELECT DISTINCT trace_id, span_id, started_at FROM journal_notes AS note "
    "WHERE of_table = 'requests' AND row IS NULL AND number > ? AND number <= ? "
    "AND started_at IS NOT NULL AND NOT EXISTS "
    "(SELECT 1 FROM requests WHERE requests.trace_id = note.trace_id "
    "AND requests.span_id = note.span_id AND requests.started_at = note.started_at)"
)
_SETTLED = f"rowid IN ({_NOTED}) AND settles_at IS NULL"
_NUMBERED = {
    table: _select(table, _SETTLED if table == requests.name else f"rowid IN ({_NOTED})", "rowid, ")
    for table in FORWARDED
}
_AFTER_ALL_NOTES = 2**63 - 1
# Deleting more at once would keep the writer of requests waiting.
_NOTES_PER_DROP = 50_000


class Run(NamedTuple):
    """A run of a journal: it has the notes from `first` to before `until`."""

    id: str
    first: int
    until: int


@dataclass(frozen=True, slots=True)
class NotedRows:
    """A batch: the notes up to the number `last`, and the rows that they name.

    Rows are read lazily from `_journal`, a connection in one snapshot, so that no row changes
    while the batch is written.
    """

    notes: int
    last: int
    _after: int
    _journal: Connection

    def has(self, table: str) -> bool:
        """Whether a note names a row of this table."""
        return (table,) in _all(self._journal, _TABLES, self._after, self.last)

    def rows(self, table: str) -> Iterator[Row]:
        """The forwarded columns of a table's rows, in order of their rowid."""
        return _each(self._journal, _SELECTS[table], table, self._after, self.last)

    def numbered(self, table: str) -> Iterator[Row]:
        """The same rows, each with its rowid first. Requests that are not settled are left out."""
        return _each(self._journal, _NUMBERED[table], table, self._after, self.last)

    def new_requests(self) -> Iterator[Row]:
        """The settled requests that were inserted and, by these notes, not changed since."""
        within = (requests.name, self._after, self.last)
        return _each(self._journal, _NEW_REQUESTS, *within, *within)

    def changed_requests(self) -> Iterator[Row]:
        """The settled requests that were changed after they were inserted."""
        return _each(self._journal, _CHANGED_REQUESTS, requests.name, self._after, self.last)

    def gone(self) -> Sequence[Key]:
        """The keys of requests that were deleted."""
        return _all(self._journal, _GONE, self._after, self.last)

    def gone_at(self) -> Sequence[Row]:
        """The keys and starts of requests that were deleted or moved to another start."""
        return _all(self._journal, _GONE_AT, self._after, self.last)


def runs_of(connection: Connection) -> list[Run]:
    """The runs of a journal, the oldest first."""
    found = _all(connection, "SELECT id, first FROM journal_runs ORDER BY first")
    ends = [first for _, first in found[1:]] + [_AFTER_ALL_NOTES]
    return [Run(run, first, until) for (run, first), until in zip(found, ends, strict=True)]


def batch_after(connection: Connection, run: Run, forwarded: int, most: int) -> NotedRows | None:
    """The next notes of a run after the number `forwarded`, `most` at most; None without any."""
    after = max(forwarded, run.first - 1)
    ((notes, last),) = _all(connection, _LAST, after, run.until, most)
    if not notes:
        return None
    return NotedRows(notes, last, after, connection)


def batch_until(connection: Connection, run: Run, forwarded: int, last: int) -> NotedRows | None:
    """The notes of a run after the number `forwarded` up to `last`; None without any."""
    after = max(forwarded, run.first - 1)
    ((notes,),) = _all(connection, _NUMBER_OF, after, last)
    return NotedRows(notes, last, after, connection) if notes else None


def has_notes(connection: Connection, run: Run) -> bool:
    """Whether there are notes of a run."""
    query = "SELECT 1 FROM journal_notes WHERE number >= ? AND number < ? LIMIT 1"
    return bool(_all(connection, query, run.first, run.until))


def forget(connection: Connection, run: Run, last: int) -> None:
    """Delete the notes of a run up to a number, and the differences that they name.

    `last` may lie beyond the run: after the journal was restored from a backup, the shared database
    has more of the run than the journal, whose later run has given these numbers again.
    """
    _forget(connection, run.first, min(last, run.until - 1))


def _forget(connection: Connection, first: int, last: int) -> int:
    for table in _DIFFERENCES:
        connection.exec_driver_sql(
            f"DELETE FROM {table} WHERE id IN (SELECT row FROM journal_notes "
            "WHERE of_table = ? AND number >= ? AND number <= ?)",
            (table, first, last),
        )
    notes = "DELETE FROM journal_notes WHERE number >= ? AND number <= ?"
    return int(connection.exec_driver_sql(notes, (first, last)).rowcount)


def last_noted_before(connection: Connection, before: float) -> int | None:
    """The highest number of a note that was made before a Unix time; None without any.

    Only the oldest _NOTES_PER_DROP notes are read.
    """
    query = (
        "SELECT max(number) FROM (SELECT number, at FROM journal_notes ORDER BY number LIMIT ?) "
        "WHERE at < ?"
    )
    ((last,),) = _all(connection, query, _NOTES_PER_DROP, before)
    found: int | None = last
    return found


def drop_until(connection: Connection, last: int) -> int:
    """Delete all notes up to a number; returns how many."""
    return _forget(connection, 0, last)


def forget_run(connection: Connection, run: Run) -> None:
    """Delete an earlier run that has no notes any more."""
    connection.exec_driver_sql("DELETE FROM journal_runs WHERE id = ?", (run.id,))


class Lag(NamedTuple):
    """How many notes wait, and for how many seconds the oldest one has waited."""

    rows: int
    seconds: float


def lag_of(connection: Connection) -> Lag:
    """The size and age of the backlog."""
    ((first, last, since),) = _all(
        connection,
        "SELECT (SELECT min(number) FROM journal_notes), (SELECT max(number) FROM journal_notes), "
        "(SELECT at FROM journal_notes ORDER BY number LIMIT 1)",
    )
    if first is None:
        return Lag(0, 0.0)
    return Lag(last - first + 1, max(time.time() - since, 0.0))


def _all(connection: Connection, query: str, *values: Any) -> list[Row]:
    return list(_each(connection, query, *values))


def _each(connection: Connection, query: str, *values: Any) -> Iterator[Row]:
    """Rows one by one as tuples of the driver: SQLAlchemy's rows take longer to make."""
    driver: Any = connection.connection.driver_connection
    rows: Iterator[Row] = driver.execute(query, values)
    return rows
