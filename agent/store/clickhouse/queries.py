"""Queries of the API on ClickHouse, where they differ from those on the other databases."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Table,
    and_,
    column,
    func,
    or_,
    select,
    table,
    tuple_,
)

from agent.analysis.tally import ALL_OBJECTIVES, CausePlace, CauseSum
from agent.records.queries import Cursor, DataSource, PageOf, Selection
from agent.store.cause_queries import SummedCauses
from agent.store.clickhouse.schema import KEYS
from agent.store.clickhouse.vector_rows import encoded_from
from agent.store.connection import reading
from agent.store.first_data import first_of_table, first_of_widths
from agent.store.rollup_queries import GroupBy, RollupRange, RollupRow, is_judged
from agent.store.rollups import ANY_LENGTH, FIGURES, SUMMED_WIDTHS_S, Series
from agent.store.selection import selected
from agent.store.store_queries import CLOCKS_DIFFER_S, Row, StoreQueries, plain_rows
from agent.store.tables import engine_minutes, engine_samples, gpu_samples, rollups
from agent.store.unreadable import DAMAGED, UNREADABLE, finite

_PLACE = ("width_s", "starts_at", *Series._fields)
_ROLLUPS = table("rollups", *map(column, (*_PLACE, "figure", "place", "n")))
# The same figures for all agents and engines together.
_FLEET = table(
    "fleet_rollups",
    *map(column, ("width_s", "starts_at", "model", "tenant", "input_length", "judged_by")),
    *map(column, ("figure", "place", "n")),
)
_CAUSES = table(
    "cause_rollups",
    *map(column, (*_PLACE, "objective", "limit_name", "cause")),
    *map(column, ("requests", "top_requests", "excess_s")),
)
# The query adds up rows itself, so the server need not merge them first (FINAL).
_SUMS = {"settings": {"final": 0}}
_PAGE_REACHES_S = (600.0, 3 * 3600.0, 3 * 86400.0)
_NO_SERIES = Series("", "", "", "", "", "")


def _within(sums: Any, each: RollupRange) -> ColumnElement[bool]:
    return and_(
        sums.c.width_s == each.width_s,
        sums.c.starts_at >= each.from_s,
        sums.c.starts_at < each.until_s,
    )


def _of_length(sums: Any, each: RollupRange, group_by: GroupBy) -> ColumnElement[bool]:
    """The rollups of each length, or of all lengths together where a width has these.

    Those of all lengths are read unless the query is grouped by length.
    """
    length: ColumnElement[str] = sums.c.input_length
    if each.width_s in SUMMED_WIDTHS_S and group_by != "input_length":
        return length == ANY_LENGTH
    return length != ANY_LENGTH


class ClickHouseQueries(StoreQueries):
    """Queries of the API on ClickHouse. Raises StoreUnavailable where it does not answer."""

    def _first_data(self, connection: Connection, source: DataSource) -> float | None:
        def of_width(width_s: int) -> int | None:
            chosen = Selection(agent=source.agent, engine=source.engine)
            sums = _sums_for(chosen, None)
            query = select(func.min(sums.c.starts_at)).where(
                sums.c.width_s == width_s, sums.c.figure == "counts", *selected(sums, chosen)
            )
            found: int | None = connection.execute(query.execution_options(**_SUMS)).scalar()
            return found

        known = [
            first_of_widths(of_width),
            first_of_table(connection, engine_samples, engine_samples.c.at, source),
            first_of_table(connection, engine_minutes, engine_minutes.c.from_at, source),
        ]
        return min((at for at in known if at is not None), default=None)

    def _rows(
        self, ranges: Sequence[RollupRange], selection: Selection, group_by: GroupBy
    ) -> Iterator[RollupRow]:
        """Rows of the sums that the server computes for each group."""
        if not ranges:
            return
        with reading(self._engine) as connection:
            found = connection.execute(_summed(ranges, selection, group_by)).all()
        figures: dict[tuple[Any, str], dict[str, bytes | None]] = defaultdict(dict)
        for of_group, judged_by, figure, places, numbers in found:
            try:
                figures[of_group, judged_by][figure] = encoded_from(places, numbers)
            except DAMAGED as error:
                key = {"group": of_group, "judged_by": judged_by, "figure": figure}
                UNREADABLE.add(rollups.name, key, error)
        for (of_group, judged_by), by_name in figures.items():
            series = _NO_SERIES._replace(judged_by=judged_by)
            if is_judged(series, selection):
                starts_at, series = _start_and_series(group_by, of_group, series)
                yield RollupRow(starts_at, series, False, [by_name.get(each) for each in FIGURES])

    def _cause_rows(
        self, ranges: Sequence[RollupRange], selection: Selection, group_by: GroupBy
    ) -> Iterator[SummedCauses]:
        if not ranges:
            return
        objective = selection.objective or ALL_OBJECTIVES
        with reading(self._engine) as connection:
            found = connection.execute(_summed_causes(ranges, selection, group_by, objective)).all()
        for of_group, judged_by, limit, cause, count, top, excess_s in found:
            series = _NO_SERIES._replace(judged_by=judged_by)
            if is_judged(series, selection):
                starts_at, series = _start_and_series(group_by, of_group, series)
                place = CausePlace(objective, limit, cause)
                yield SummedCauses(
                    starts_at, series, place, CauseSum(int(count), int(top), excess_s)
                )

    def _page(
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
            page = super()._page(table, sorted_by, within, after, limit)
            if page.next is not None:
                return page
        return super()._page(table, sorted_by, conditions, after, limit)

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


def _sums_for(selection: Selection, group_by: GroupBy) -> Any:
    """The smallest table that has the fields of the selection and of the group."""
    of_agents = selection.agent is not None or selection.engine is not None
    return _ROLLUPS if of_agents or group_by in ("agent", "engine") else _FLEET


def _group(sums: Any, group_by: GroupBy) -> ColumnElement[Any]:
    # Each width is a group where nothing else is.
    found: ColumnElement[Any] = sums.c[group_by or "width_s"]
    return found.label("of_group")


def _start_and_series(group_by: GroupBy, of_group: Any, series: Series) -> tuple[int, Series]:
    """The start and the series of a group; fields by which it is not grouped are empty."""
    if group_by is None:
        return 0, series
    if group_by == "starts_at":
        return of_group, series
    return 0, series._replace(**{group_by: of_group})


def _summed(ranges: Sequence[RollupRange], selection: Selection, group_by: GroupBy) -> Select[Any]:
    """Group, `judged_by`, figure, and the places and sums of its numbers."""
    rows = _sums_for(selection, group_by)
    keys = [
        _group(rows, group_by),
        rows.c.judged_by.label("judged"),
        rows.c.figure.label("of_figure"),
        rows.c.place.label("of_place"),
    ]
    sums = (
        select(*keys, func.sum(rows.c.n).label("number"))
        .where(
            *selected(rows, selection),
            or_(*(and_(_within(rows, each), _of_length(rows, each, group_by)) for each in ranges)),
        )
        .group_by(*keys)
        .subquery("sums")
    )
    of_figure = (sums.c.of_group, sums.c.judged, sums.c.of_figure)
    arrays = (func.groupArray(sums.c.of_place), func.groupArray(sums.c.number))
    return select(*of_figure, *arrays).group_by(*of_figure).execution_options(**_SUMS)


def _summed_causes(
    ranges: Sequence[RollupRange], selection: Selection, group_by: GroupBy, objective: str
) -> Select[Any]:
    """Group, `judged_by`, limit, cause, requests, top requests and excess seconds."""
    rows = _CAUSES.c
    keys = [
        _group(_CAUSES, group_by),
        rows.judged_by.label("judged"),
        rows.limit_name.label("of_limit"),
        rows.cause.label("of_cause"),
    ]
    counted, excess_s = func.sum(rows.requests), func.round(func.sum(finite(rows.excess_s)), 9)
    return (
        # A known share of a request is never 0 s, so a sum of 0 s is unknown.
        select(*keys, counted, func.sum(rows.top_requests), func.nullIf(excess_s, 0))
        .where(
            *selected(_CAUSES, selection),
            or_(*(_within(_CAUSES, each) for each in ranges)),
            rows.objective == objective,
        )
        .group_by(*keys)
        .having(counted > 0)
        .execution_options(**_SUMS)
    )
