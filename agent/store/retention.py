"""Deletes the rows that are older than their retention; PostgreSQL's by partitions of a day."""

import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from functools import partial
from math import inf
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Table,
    TableClause,
    and_,
    column,
    delete,
    literal,
    select,
    table,
    text,
    update,
)

from agent.store.connection import for_writing, in_transaction, read_all, without_number
from agent.store.engine_counts import COUNT_WIDTHS_S
from agent.store.folding import agents_with_series, expire_series
from agent.store.rollups import KEEP_S, WIDTHS_S
from agent.store.tables import (
    agents,
    cause_rollups,
    deleted_requests,
    engine_counts,
    engine_samples,
    events,
    gpu_samples,
    metadata,
    objectives,
    requests,
    rollup_series,
    rollups,
)
from agent.store.utc_timestamp import UtcTimestamp

_LOG = logging.getLogger(__name__)

# Tables that PostgreSQL partitions, and the columns with their times.
PARTITIONED: Mapping[str, str] = {
    requests.name: requests.c.started_at.name,
    engine_samples.name: engine_samples.c.at.name,
    gpu_samples.name: gpu_samples.c.at.name,
}
# An agent may be away for a weekend; later rows go to the partition of other days first.
DAYS_AHEAD = 3
# An arbitrary number that all agents share.
_LOCK = 730_111_948
# A long query of an operator keeps a partition; all others would wait behind us.
_WAITS = text("SET LOCAL lock_timeout = '2s'")
# A lock for each table: an agent at work on one must not make others leave out the rest.
_TAKE_TURN = text("SELECT pg_try_advisory_xact_lock(:lock, hashtext(:table))")
_PARTITIONS = text(
    "SELECT inhrelid::regclass::text FROM pg_inherits "
    "WHERE inhparent = to_regclass(:table) ORDER BY 1"
)


def other_days(name: str) -> TableClause:
    """The partition for rows of the days that have none, such as those of a wrong clock."""
    return table(f"{name}_other_days", column("id"), column(PARTITIONED[name]))


def keep_partitions(engine: Engine, before: float, now: float) -> None:
    """Make the partitions of the next days, and drop those whose rows are all before a Unix time.

    Agents take turns at each table: one that finds another at it leaves it the work. Raises
    StoreUnavailable if a query of somebody else holds a table for too long.
    """
    for name in PARTITIONED:
        in_transaction(engine, partial(_make_ahead, name=name, today=_day(now)))
        in_transaction(engine, partial(_drop_old, name=name, before=before))


def _make_ahead(connection: Connection, name: str, today: date) -> None:
    if not _has_turn(connection, name):
        return
    there = _days(connection, name)
    wanted = (today + timedelta(days=days) for days in range(DAYS_AHEAD + 1))
    missing = [day for day in wanted if day not in there]
    if missing:
        # Else a row could enter the table between the check and the end of the attachment.
        connection.execute(text(f"LOCK TABLE {name}_other_days IN ACCESS EXCLUSIVE MODE"))
    for day in missing:
        _make(connection, name, day)


def _make(connection: Connection, name: str, day: date) -> None:
    """Make a partition beside the table and attach it, for which nobody must stop writing."""
    start, new, at = _starts_at(day), f"{name}_{day:%Y%m%d}", PARTITIONED[name]
    first, end = start.isoformat(), (start + timedelta(days=1)).isoformat()
    for statement in (
        f"CREATE TABLE {new} (LIKE {name} INCLUDING DEFAULTS)",
        f"WITH moved AS (DELETE FROM {name}_other_days WHERE {at} >= '{first}' AND {at} < '{end}' "
        f"RETURNING *) INSERT INTO {new} SELECT * FROM moved",
        f"ALTER TABLE {name} ATTACH PARTITION {new} FOR VALUES FROM ('{first}') TO ('{end}')",
    ):
        connection.execute(text(statement))


def _drop_old(connection: Connection, name: str, before: float) -> None:
    if not _has_turn(connection, name):
        return
    for day, partition in _days(connection, name).items():
        if _starts_at(day).timestamp() + 86400 <= before:
            connection.execute(text(f"DROP TABLE {partition}"))
            _LOG.info("%s was dropped: all its rows were old", partition)


def _has_turn(connection: Connection, name: str) -> bool:
    connection.execute(_WAITS)
    return bool(connection.execute(_TAKE_TURN, {"lock": _LOCK, "table": name}).scalar_one())


def _days(connection: Connection, name: str) -> dict[date, str]:
    """The partitions of a table by their day."""
    found = connection.execute(_PARTITIONS, {"table": name}).scalars()
    named = ((each, each.rpartition("_")[2]) for each in found)
    return {
        datetime.strptime(word, "%Y%m%d").date(): each for each, word in named if word.isdecimal()
    }


def _day(at: float) -> date:
    return datetime.fromtimestamp(at, UTC).date()


def _starts_at(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)


# A delete keeps the request writer from writing, so rows are deleted in slices.
ROWS_PER_SLICE = 5000
# Of a series, hundreds of rollups may go at once.
_SERIES_PER_SLICE = 50
# The row of an agent, at least: that of one that runs is hours younger.
_AGENT_KEPT_S = 86400.0


class Retention:
    """Deletes old rows of all agents. Raises StoreUnavailable."""

    def __init__(self, engine: Engine) -> None:
        self._reading = engine
        self._engine = without_number(for_writing(engine))

    def expire(self, requests_before: float, rollups_before: float, now: float) -> int:
        """Delete older rows, slice by slice; returns how many rows were deleted.

        PostgreSQL drops requests and samples by the day, which are in no count.
        """
        return (
            self._expire_requests(requests_before, now)
            + self._expire_rows(deleted_requests, deleted_requests.c.started_at, requests_before)
            + self._expire_rows(events, events.c.at, rollups_before)
            + sum(
                self._expire_rollups(
                    table, width_s, max(rollups_before, now - KEEP_S.get(width_s, inf))
                )
                for table in (rollups, cause_rollups)
                for width_s in WIDTHS_S
            )
            + sum(self._expire_counts(rollups_before, now, width_s) for width_s in COUNT_WIDTHS_S)
            + self._expire_series()
            + self._expire_agents(min(requests_before, now - _AGENT_KEPT_S), now)
        )

    def _expire_requests(self, before: float, now: float) -> int:
        """Requests and samples."""
        by_day = self._engine.dialect.name == "postgresql"
        if by_day:
            keep_partitions(self._engine, before, now)
        deleted = 0
        for name, at in PARTITIONED.items():
            rows = other_days(name) if by_day else metadata.tables[name]
            deleted += self._expire_rows(rows, rows.c[at], before)
        return deleted

    def _expire_rows(self, table: TableClause, at: ColumnElement[Any], before: float) -> int:
        deleted = 0
        old = at < literal(before, UtcTimestamp)
        while True:
            slice_of = select(table.c.id).where(old).limit(ROWS_PER_SLICE)
            in_slice = self._delete(delete(table).where(and_(table.c.id.in_(slice_of))))
            deleted += in_slice
            if in_slice < ROWS_PER_SLICE:
                return deleted

    def _expire_counts(self, before: float, now: float, width_s: int) -> int:
        before = max(before, now - KEEP_S.get(width_s, inf))
        table = engine_counts.c
        old = and_(table.width_s == width_s, table.starts_at <= before - width_s)
        return self._delete(delete(engine_counts).where(old))

    def _expire_rollups(self, table: Table, width_s: int, before: float) -> int:
        """Delete what ended before; rollups are sorted by series, so they are found by series."""
        old = and_(table.c.width_s == width_s, table.c.starts_at <= before - width_s)
        return sum(
            self._delete(delete(table).where(old, table.c.series.in_(slice_of)))
            for slice_of in self._series()
        )

    def _series(self) -> Sequence[Any]:
        """All series, in slices on SQLite, where a delete keeps other writers waiting."""
        query = select(rollup_series.c.id).order_by(rollup_series.c.id)
        if self._engine.dialect.name == "postgresql":
            return [query]
        found = [row.id for row in read_all(self._reading, query)]
        firsts = range(0, len(found), _SERIES_PER_SLICE)
        return [found[first : first + _SERIES_PER_SLICE] for first in firsts]

    def _expire_series(self) -> int:
        return sum(
            in_transaction(self._engine, partial(expire_series, agent=agent))
            for agent in in_transaction(self._engine, agents_with_series)
        )

    def _expire_agents(self, before: float, now: float) -> int:
        """Delete the agents that were not seen since, and end what they judged by."""

        def expire(connection: Connection) -> int:
            old = delete(agents).where(agents.c.seen_at < before).returning(agents.c.name)
            gone = connection.execute(old).scalars().all()
            judged_by = and_(objectives.c.agent.in_(gone), objectives.c.in_force_until.is_(None))
            connection.execute(update(objectives).where(judged_by).values(in_force_until=now))
            return len(gone)

        return in_transaction(self._engine, expire)

    def _delete(self, statement: Any) -> int:
        return in_transaction(
            self._engine, lambda connection: int(connection.execute(statement).rowcount)
        )
