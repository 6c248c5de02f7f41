"""What changed in an agent's file after a number: whole rows, as they are now.

Each writing transaction has the next number, and each row the number of the transaction that last
changed it. So what was published up to a number is all that is to be remembered.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, Table, select

from agent.store.rollups import Series
from agent.store.tables import (
    cause_rollups,
    deleted_requests,
    engine_counts,
    engine_minutes,
    engine_samples,
    events,
    gpu_samples,
    publishing,
    requests,
    rollups,
)

Row = tuple[Any, ...]

TABLES = (
    *(requests, engine_samples, gpu_samples, events),
    *(engine_minutes, engine_counts, rollups, cause_rollups),
)
COLUMNS: Mapping[str, tuple[str, ...]] = {
    table.name: tuple(column.name for column in table.c) for table in TABLES
}
_NAMES = (*COLUMNS, deleted_requests.name)
_WITHIN = "changed > ? AND changed <= ?"


def _select(table: Table) -> str:
    # A view that waits for another view is not published before it is counted.
    settled = " AND (settles_at IS NULL OR counted)" if table is requests else ""
    return (
        f"SELECT {', '.join(COLUMNS[table.name])} FROM {table.name} "
        f"WHERE {_WITHIN}{settled} ORDER BY changed"
    )


_SELECTS = {table.name: _select(table) for table in TABLES}
# A key that was deleted may have a new row by now.
_DELETED = (
    f"SELECT DISTINCT trace_id, span_id, started_at FROM deleted_requests AS gone WHERE {_WITHIN} "
    "AND NOT EXISTS (SELECT 1 FROM requests WHERE requests.trace_id = gone.trace_id "
    "AND requests.span_id = gone.span_id AND requests.started_at = gone.started_at)"
)
_SERIES = (
    f"SELECT id, {', '.join(Series._fields)} FROM rollup_series WHERE id IN "
    f"(SELECT series FROM rollups WHERE {_WITHIN} "
    f"UNION SELECT series FROM cause_rollups WHERE {_WITHIN})"
)


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """The rows that transactions after the number `after` up to `last` changed.

    `is_newest` if no later transaction has ended. `connection` reads one snapshot of the file.
    """

    file: str
    after: int
    last: int
    is_newest: bool
    connection: Connection

    def rows(self, table: Table) -> list[Row]:
        """The rows of a table, each with the values of COLUMNS."""
        return [*self._all(_SELECTS[table.name], self.after, self.last)]

    def deleted(self) -> list[Row]:
        """The trace, span and start of requests that were deleted, or moved to another start."""
        return [*self._all(_DELETED, self.after, self.last)]

    def series(self) -> dict[int, Series]:
        """The series of the rollups in this batch, by their ids in the file."""
        found = self._all(_SERIES, *(self.after, self.last) * 2)
        return {row_id: Series(*rest) for row_id, *rest in found}

    def _all(self, query: str, *values: Any) -> Iterator[Row]:
        """Tuples of the driver: SQLAlchemy's rows take longer to make."""
        driver: Any = self.connection.connection.driver_connection
        rows: Iterator[Row] = driver.execute(query, values)
        return rows


def batch_after(connection: Connection, number: int, most: int) -> ChangedRows | None:
    """The next changes after a number; None without any.

    It ends with a transaction: with the one that brings a table to `most` rows, at the latest.
    """
    file, newest = connection.execute(select(publishing.c.file, publishing.c.last)).one()
    if newest <= number:
        return None
    last = newest
    for name in _NAMES:
        query = f"SELECT changed FROM {name} WHERE {_WITHIN} ORDER BY changed LIMIT 1 OFFSET ?"
        found = connection.exec_driver_sql(query, (number, last, most - 1)).scalar()
        last = last if found is None else found
    return ChangedRows(file, number, last, last == newest, connection)


def prepare_file(connection: Connection) -> None:
    """Prepare a file to be published, at each start: index its changes, and store its number.

    Raises the errors of SQLAlchemy.
    """
    for name in _NAMES:
        connection.exec_driver_sql(
            f"CREATE INDEX IF NOT EXISTS ix_{name}_changed ON {name} (changed)"
        )
    connection.exec_driver_sql(
        "UPDATE publishing SET last_at_start = coalesce(last_at_start, last)"
    )


def forget_start(connection: Connection) -> None:
    """The shared database is reached: the file has at least what is published of it."""
    connection.execute(publishing.update().values(last_at_start=None))


class FileState(NamedTuple):
    """The row of `publishing`."""

    file: str
    last: int
    published: int
    complete_at: float
    last_at_start: int | None

    def lacks(self, stored: int) -> bool:
        """Whether the shared database has more of the file: it was restored from a backup.

        What the agent wrote since its start says nothing: its numbers may be as high.
        """
        return stored > self.known

    @property
    def known(self) -> int:
        """The last number before the start; since the shared database was reached, any."""
        return self.last if self.last_at_start is None else self.last_at_start


def file_state(connection: Connection) -> FileState:
    """Which file this is, and how far it is published."""
    return FileState(*connection.execute(select(publishing)).one())


def set_published(connection: Connection, number: int, complete_at: float | None) -> None:
    """Note that the shared database has everything up to a number.

    `complete_at` is since when it has everything; None while it does not.
    """
    values: dict[str, Any] = {"published": number}
    if complete_at is not None:
        values["complete_at"] = complete_at
    connection.execute(publishing.update().values(values))
    connection.exec_driver_sql("DELETE FROM deleted_requests WHERE changed <= ?", (number,))


class Lag(NamedTuple):
    """How many rows wait to be published, and for how many seconds the oldest one has waited."""

    rows: int
    seconds: float


def lag_of(connection: Connection) -> Lag:
    """What waits; the seconds are those since nothing waited."""
    state = file_state(connection)
    if state.last <= state.published:
        return Lag(0, 0.0)
    counts = (f"SELECT count(*) FROM {name} WHERE changed > {state.published}" for name in COLUMNS)
    rows = sum(connection.exec_driver_sql(query).scalar_one() for query in counts)
    return Lag(rows, max(time.time() - state.complete_at, 0.0) if rows else 0.0)
