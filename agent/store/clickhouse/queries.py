"""Queries of the API on ClickHouse, where they differ from those on the other databases."""

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, func, select, tuple_

from agent.records.queries import Cursor, DataSource, PageOf, Selection
from agent.store.clickhouse.schema import KEYS
from agent.store.rollup_queries import first_of_table, first_of_widths, selected
from agent.store.store_queries import CLOCKS_DIFFER_S, Row, StoreQueries, plain_rows
from agent.store.tables import engine_minutes, engine_samples, gpu_samples, rollup_series, rollups

# Replaced rows change nothing in the result, so the server need not look for them (FINAL).
_REPLACED_TOO = {"settings": {"final": 0}}
_PAGE_REACHES_S = (600.0, 3 * 3600.0, 3 * 86400.0)


class ClickHouseQueries(StoreQueries):
    """Queries of the API on ClickHouse. Raises StoreUnavailable where it does not answer."""

    def _first_data(self, connection: Connection, source: DataSource) -> float | None:
        chosen = Selection(agent=source.agent, engine=source.engine)
        series = select(rollup_series.c.id).where(*selected(rollup_series, chosen))

        def of_width(width_s: int) -> int | None:
            query = select(func.min(rollups.c.starts_at)).where(
                rollups.c.width_s == width_s, rollups.c.series.in_(series)
            )
            found: int | None = connection.execute(query, execution_options=_REPLACED_TOO).scalar()
            return found

        known = [
            first_of_widths(of_width),
            first_of_table(connection, engine_samples, engine_samples.c.at, source),
            first_of_table(connection, engine_minutes, engine_minutes.c.from_at, source),
        ]
        return min((at for at in known if at is not None), default=None)

    def _newest(
        self,
        table: Table,
        sorted_by: ColumnElement[float],
        conditions: Sequence[ColumnElement[bool]],
        after: Cursor | None,
        limit: int,
    ) -> PageOf[Row]:
        """A page of rows, looked for in a short window first: so not all rows are read."""
        until = time.time() if after is None else after.at
        for reach_s in _PAGE_REACHES_S:
            within = [*conditions, sorted_by >= until - reach_s]
            page = super()._newest(table, sorted_by, within, after, limit)
            if page.next is not None:
                return page
        return super()._newest(table, sorted_by, conditions, after, limit)

    def _whole(
        self,
        table: Table,
        conditions: Sequence[ColumnElement[bool]],
        order: Sequence[ColumnElement[Any]],
        limit: int,
    ) -> Sequence[Any]:
        """Whole rows. The keys are found first, by the columns of the conditions alone."""
        key = [table.c[name] for name in KEYS[table.name]]
        found = select(*key).where(*conditions).order_by(*order).limit(limit).correlate(None)
        query = select(table).where(tuple_(*key).in_(found)).order_by(*order)
        return self._rows_of(table, query)

    def newest_gpu_samples(self, now: float) -> Sequence[Row]:
        """The newest stored sample of each GPU at a Unix time, from any agent.

        A sample from the future is used only where there is no other: the clock was set back.
        """
        rows = gpu_samples.c
        by_then = func.maxIf(rows.at, rows.at <= now + CLOCKS_DIFFER_S)
        newest = select(rows.gpu, func.coalesce(by_then, func.max(rows.at))).group_by(rows.gpu)
        query = (
            select(gpu_samples)
            .where(tuple_(rows.gpu, rows.at).in_(newest))
            .order_by(rows.agent, rows.gpu_index, rows.gpu, rows.id)
        )
        rows_of_gpus = plain_rows(gpu_samples, self._rows_of(gpu_samples, query))
        by_gpu = {row["gpu"]: row for row in rows_of_gpus}
        return list(by_gpu.values())
