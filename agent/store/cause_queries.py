"""Sums of causes over a window: of rollups, or of rows where only these have the group."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Connection, func, select

from agent.analysis.tally import ALL_OBJECTIVES, CausePlace, CauseSum, CauseSums, sums_of
from agent.catalog.metrics import OTHER
from agent.records.queries import OF_ROWS, Dimension, Selection, Window
from agent.store.connection import ROWS_PER_READ, reading
from agent.store.explanations import explanation_from
from agent.store.rollup_queries import (
    SERIES_PER_READ,
    GroupBy,
    RollupQueries,
    RollupRange,
    selected_series,
    step_at,
)
from agent.store.rollups import Series
from agent.store.row_groups import ROW_GROUPS, busiest, ended_in
from agent.store.tables import cause_rollups, requests
from agent.store.time_limits import refuse_when_late
from agent.store.unreadable import finite, readable

Group = TypeVar("Group", bound=Hashable)
_Sums = dict[CausePlace, CauseSum]


class SummedCauses(NamedTuple):
    """Rollups of one series, limit and cause; all starts together where no step is asked for."""

    starts_at: int
    series: Series
    place: CausePlace
    cause_sum: CauseSum


class CauseQueries(RollupQueries):
    """Queries sums of causes. Raises StoreUnavailable where the database does not answer.

    Each sum is of the selected objective, or of that one which a request exceeded most.
    """

    def causes(self, window: Window, selection: Selection) -> CauseSums:
        """The sums of the missed requests that ended in the window."""
        sums = self._causes(self._cover_of(window), selection, lambda _row: None)
        return sums.get(None, {})

    def causes_by_step(
        self, window: Window, step_s: int, selection: Selection
    ) -> Mapping[int, CauseSums]:
        """The sums of each step that has any, by the Unix second that the step starts at."""
        _, ranges = self._steps_of(window, step_s)
        return self._causes(
            ranges,
            selection,
            lambda row: step_at(window, step_s, row.starts_at),
            group_by="starts_at",
        )

    def causes_by(
        self, dimension: Dimension, window: Window, selection: Selection
    ) -> Mapping[str | None, CauseSums]:
        """The sums of each engine, model, tenant and so on; None is the key where it is unknown.

        By a dimension that only rows know, this reads the rows of the window's missed requests.
        """
        if dimension in OF_ROWS:
            with reading(self._engine) as connection:
                return _of_rows(connection, dimension, window, selection)
        return self._causes(
            self._cover_of(window),
            selection,
            lambda row: getattr(row.series, dimension) or None,
            group_by=dimension,
        )

    def _causes(
        self,
        ranges: Sequence[RollupRange],
        selection: Selection,
        group_of: Callable[[SummedCauses], Group],
        *,
        group_by: GroupBy = None,
    ) -> dict[Group, _Sums]:
        sums: dict[Group, _Sums] = defaultdict(dict)
        for row in self._cause_rows(ranges, selection, group_by):
            sums[group_of(row)].setdefault(row.place, CauseSum()).add(row.cause_sum)
        return dict(sums)

    def _cause_rows(
        self, ranges: Sequence[RollupRange], selection: Selection, group_by: GroupBy
    ) -> Iterator[SummedCauses]:
        """Sums of causes; rows that differ only in other fields than `group_by` may come as one."""
        with reading(self._engine) as connection:
            series = selected_series(connection, selection)
            for each in ranges:
                yield from _rows(
                    connection, each, series, selection, by_start=group_by == "starts_at"
                )


def _rows(
    connection: Connection,
    wanted: RollupRange,
    series: Mapping[int, Series],
    selection: Selection,
    *,
    by_start: bool,
) -> Iterator[SummedCauses]:
    objective = selection.objective or ALL_OBJECTIVES
    table, ids = cause_rollups.c, list(series)
    starts: ColumnElement[int] = table.starts_at if by_start else func.min(table.starts_at)
    group = (table.series, table.limit_name, table.cause)
    for first in range(0, len(ids), SERIES_PER_READ):
        query = (
            select(
                *group,
                starts,
                func.sum(table.requests),
                func.sum(table.top_requests),
                func.sum(finite(table.excess_s)),
            )
            .where(
                table.width_s == wanted.width_s,
                table.series.in_(ids[first : first + SERIES_PER_READ]),
                table.starts_at >= wanted.from_s,
                table.starts_at < wanted.until_s,
                table.objective == objective,
            )
            .group_by(*group, *((starts,) if by_start else ()))
            .having(func.sum(table.requests) > 0)
        )
        for row_id, limit, cause, starts_at, count, top, excess_s in connection.execute(query):
            place = CausePlace(objective, limit, cause)
            yield SummedCauses(
                starts_at, series[row_id], place, CauseSum(int(count), int(top), excess_s)
            )


def _of_rows(
    connection: Connection, dimension: Dimension, window: Window, selection: Selection
) -> dict[str | None, CauseSums]:
    """The sums of each group of rows; those but the busiest are one. Raises QueryTooSlow."""
    objective = selection.objective or ALL_OBJECTIVES
    names = frozenset(busiest(connection, dimension, window, selection))
    columns = (requests.c[name] for name in ("trace_id", "span_id", "cause", "explanation"))
    query = select(ROW_GROUPS[dimension].label("group"), *columns).where(
        *ended_in(window, selection), requests.c.explanation.is_not(None)
    )
    sums: dict[str | None, _Sums] = defaultdict(dict)
    rows = connection.execute(query, execution_options={"yield_per": ROWS_PER_READ})
    for part in rows.mappings().partitions():
        refuse_when_late(connection)
        for row in part:
            name = row["group"]
            of_group = sums[name if name is None or name in names else OTHER]
            (of_row,) = readable(requests, [row], _sums_of_row) or [_Sums()]
            for place, each in of_row.items():
                if place.objective == objective:
                    of_group.setdefault(place, CauseSum()).add(each)
    return {group: of_group for group, of_group in sums.items() if of_group}


def _sums_of_row(row: Mapping[str, Any]) -> Mapping[CausePlace, CauseSum]:
    return sums_of(explanation_from(row))
