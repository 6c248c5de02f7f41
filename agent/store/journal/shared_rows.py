"""Writes a batch of a journal to the shared PostgreSQL: all its rows and its mark, or nothing.

The mark is the number of the last note of a run that the database has. It is written in the
transaction of the rows, so a batch is neither lost nor written twice where the response to its
commit was lost.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from sqlalchemy import Connection, and_, delete, or_, text

from agent.store.cause_rollups import SUMS, add_differences
from agent.store.inserting import Key
from agent.store.journal.backlog import FORWARDED, NotedRows, Row
from agent.store.journal.noting import (
    CAUSE_DIFFERENCES,
    CAUSE_PLACE,
    ROLLUP_DIFFERENCES,
)
from agent.store.rollups import Series
from agent.store.tables import (
    engine_minutes,
    engine_samples,
    events,
    gpu_samples,
    journals,
    requests,
    rollup_changes,
)

_COPIED = {
    **{table.name: table.name for table in (engine_samples, gpu_samples, events)},
    ROLLUP_DIFFERENCES: rollup_changes.name,
}
# The key by which a forwarded row replaces a row that is there.
_REPLACED = {
    requests.name: ("trace_id", "span_id", "started_at"),
    engine_minutes.name: ("agent", "engine", "starts_at"),
}

_NEW_MARK = text(
    "INSERT INTO journals (run, agent, forwarded, at) VALUES (:run, :agent, 0, now()) "
    "ON CONFLICT (run) DO NOTHING"
)
_MARK = text("SELECT forwarded FROM journals WHERE run = :run FOR UPDATE")
_SET_MARK = text("UPDATE journals SET forwarded = :last, at = now() WHERE run = :run")

# A joined row replaces the proxy's row, and the engine's row where this has another start. Only
# partitions of the days around are read.
_JOINED = (
    "DELETE FROM requests USING forwarded_requests AS joined WHERE joined.vantage = 'joined' "
    "AND requests.trace_id = joined.trace_id AND (requests.span_id = joined.proxy_span_id "
    "OR requests.span_id = joined.span_id AND requests.started_at <> joined.started_at) "
    "AND requests.started_at BETWEEN joined.started_at - interval '1 day' "
    "AND joined.started_at + interval '1 day'"
)
_GONE = text(
    "DELETE FROM requests USING unnest(CAST(:traces AS text[]), CAST(:spans AS text[])) "
    "AS gone (trace_id, span_id) "
    "WHERE requests.trace_id = gone.trace_id AND requests.span_id = gone.span_id"
)


def begin_mark(connection: Connection, run: str, agent: str) -> None:
    """Make the mark of a run, if there is none."""
    connection.execute(_NEW_MARK, {"run": run, "agent": agent})


def expire_marks(connection: Connection, agent: str, *, own_before: float, before: float) -> None:
    """Delete the marks of runs that forwarded nothing since a Unix time, those of others later.

    A journal that comes back after a long time would be forwarded twice without its mark.
    """
    old = journals.c.at < before
    own = and_(journals.c.agent == agent, journals.c.at < own_before)
    connection.execute(delete(journals).where(or_(own, old)))


def locked_mark(connection: Connection, run: str) -> int:
    """The last number of a run that the database has.

    Waits for an earlier transaction of this run: the server may still commit a transaction whose
    connection this agent has cut off.
    """
    return int(connection.execute(_MARK, {"run": run}).scalar_one())


def set_mark(connection: Connection, run: str, last: int) -> None:
    """Write that the database has a run up to a number."""
    connection.execute(_SET_MARK, {"run": run, "last": last})


def write_batch(connection: Connection, batch: NotedRows, max_series: int) -> None:
    """Write the rows of a batch; each replaces a row with its key."""
    # Timestamps of the journal are in UTC, and their text names no zone.
    connection.exec_driver_sql("SET LOCAL TIME ZONE 'UTC'")
    if batch.has(requests.name):
        _write_requests(connection, batch)
    if batch.has(engine_minutes.name):
        _replace(connection, engine_minutes.name, batch.rows(engine_minutes.name))
    for table, place in _COPIED.items():
        if batch.has(table):
            copy_rows(connection, place, FORWARDED[table], batch.rows(table))
    if batch.has(CAUSE_DIFFERENCES):
        _add_causes(connection, batch.rows(CAUSE_DIFFERENCES), max_series)


def _write_requests(connection: Connection, batch: NotedRows) -> None:
    if gone := batch.gone():
        _delete(connection, gone)
    driver: Any = connection.dialect.dbapi
    try:
        with connection.begin_nested():
            copy_rows(connection, requests.name, FORWARDED[requests.name], batch.new_requests())
    except driver.IntegrityError:
        # A row is there already: another agent got the same span, or the row was joined since.
        _replace(connection, requests.name, batch.new_requests())
    _replace(connection, requests.name, batch.changed_requests())


def copy_rows(
    connection: Connection, table: str, columns: Sequence[str], rows: Iterable[Row]
) -> None:
    """Copy rows into a table by COPY, the fastest way of the driver."""
    cursor: Any = connection.connection.cursor()
    with cursor, cursor.copy(f"COPY {table} ({', '.join(columns)}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)


def _delete(connection: Connection, gone: Sequence[Key]) -> None:
    traces, spans = zip(*gone, strict=True)
    connection.execute(_GONE, {"traces": list(traces), "spans": list(spans)})


def _replace(connection: Connection, table: str, rows: Iterator[Row]) -> None:
    first = next(rows, None)
    if first is None:
        return
    key, columns = _REPLACED[table], FORWARDED[table]
    names = ", ".join(columns)
    connection.exec_driver_sql(
        f"CREATE TEMPORARY TABLE IF NOT EXISTS forwarded_{table} ON COMMIT DELETE ROWS "
        f"AS SELECT {names} FROM {table} WITH NO DATA"
    )
    copy_rows(connection, f"forwarded_{table}", columns, chain((first,), rows))
    if table == requests.name:
        connection.exec_driver_sql(_JOINED)
    values = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in key)
    # All writers insert in one order, so that no two of them deadlock.
    connection.exec_driver_sql(
        f"INSERT INTO {table} ({names}) SELECT {names} FROM forwarded_{table} "
        f"ORDER BY {', '.join(key)} ON CONFLICT ({', '.join(key)}) DO UPDATE SET {values}"
    )


def _add_causes(connection: Connection, rows: Iterable[Row], max_series: int) -> None:
    """Add the differences of sums of causes, those of one place and series together."""
    by_agent: dict[str, dict[Row, list[Any]]] = defaultdict(dict)
    series_at, sums_at = len(CAUSE_PLACE), len(CAUSE_PLACE) + len(Series._fields)
    for row in rows:
        place, series = row[:series_at], Series(*row[series_at:sums_at])
        total = by_agent[series.agent].setdefault((*place, series), [0, 0, None])
        total[:] = map(_sum, total, row[sums_at:])
    for agent, totals in sorted(by_agent.items()):
        differences = [
            (key[-1], dict(zip((*CAUSE_PLACE, *SUMS), (*key[:-1], *total), strict=True)))
            for key, total in totals.items()
        ]
        add_differences(connection, agent, differences, max_series)


def _sum(one: Any, other: Any) -> Any:
    """The sum of two numbers; of one number and None the number, of two None None."""
    if one is None or other is None:
        return other if one is None else one
    return one + other
