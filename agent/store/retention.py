"""Deletes the rows that are older than their retention; on PostgreSQL mostly by whole days."""

from collections.abc import Sequence
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
    delete,
    literal,
    select,
    update,
)

from agent.store.connection import for_writing, in_transaction, read_all, without_number
from agent.store.day_partitions import PARTITIONED, keep_partitions, other_days
from agent.store.folding import agents_with_series, expire_series
from agent.store.rollups import KEEP_S, WIDTHS_S
from agent.store.tables import (
    agents,
    cause_rollups,
    deleted_requests,
    events,
    metadata,
    objectives,
    rollup_series,
    rollups,
)
from agent.store.utc_timestamp import UtcTimestamp

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
