"""Sums of requests over a window, from rollups and unfolded changes; when the data begins."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from math import ceil, isfinite
from typing import Any, Literal, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Connection, Engine, FromClause, Table, func, null, select

from agent.analysis.tally import ALL_OBJECTIVES, Tally, VerdictCounts
from agent.catalog.definitions import Verdict
from agent.catalog.metrics import OTHER
from agent.catalog.time_units import DAY_S, MINUTE_S
from agent.records.queries import (
    DataSource,
    Dimension,
    Selection,
    VerdictsByMinute,
    Window,
)
from agent.store.connection import for_reading, reading
from agent.store.rollups import (
    ANY_LENGTH,
    FIGURES,
    KEEP_S,
    MAX_SERIES,
    NARROW_S,
    SUMMED_WIDTHS_S,
    WIDTHS_S,
    RollupSum,
    Series,
    objective_names,
    series_key,
)
from agent.store.tables import (
    engine_minutes,
    engine_samples,
    requests,
    rollup_changes,
    rollup_series,
    rollups,
)
from agent.store.unreadable import DAMAGED, UNREADABLE

# What a selection names, without objectives.
NAMED = ("agent", "engine", "model", "tenant")


def first_data_at(connection: Connection, source: DataSource) -> float | None:
    """The begin of the data of an agent, of an engine or of all, in Unix seconds; None without any.

    Requests alone would not do: an agent that waits for its first request has data, too.
    """
    known = [at for at in _first_moments(connection, source) if at is not None]
    return min((at for at in known if isfinite(at)), default=None)


def _of(table: Table, source: DataSource) -> list[ColumnElement[bool]]:
    wanted = {"agent": source.agent, "engine": source.engine}
    return [table.c[name] == value for name, value in wanted.items() if value is not None]


def _first_moments(connection: Connection, source: DataSource) -> Iterator[float | None]:
    yield first_of_widths(partial(_first_of_width, connection, source))
    if connection.dialect.name == "sqlite":
        # Agents fold changes in their files.
        yield first_of_table(connection, rollup_changes, rollup_changes.c.starts_at, source)
    for table, column in (
        (engine_samples, engine_samples.c.at),
        (engine_minutes, engine_minutes.c.from_at),
    ):
        yield first_of_table(connection, table, column, source)


def first_of_table(
    connection: Connection, table: Table, column: ColumnElement[Any], source: DataSource
) -> float | None:
    """The first value of a column, of an agent, an engine or of all."""
    found: float | None = connection.execute(
        # Without what SQLite sorts before timestamps and is none.
        select(func.min(column)).where(*_of(table, source), column >= 0)
    ).scalar()
    return found


def first_of_widths(first_of_width: Callable[[int], float | None]) -> float | None:
    """The start of the first rollup, of the narrowest width that is kept for so long."""
    first: float | None = None
    width_s = WIDTHS_S[-1]
    for narrower_s in reversed(WIDTHS_S):
        starts_at = first_of_width(narrower_s)
        if first is None or (starts_at is not None and starts_at < first + width_s):
            first, width_s = starts_at, narrower_s
    return first


def _first_of_width(connection: Connection, source: DataSource, width_s: int) -> float | None:
    # By series, so that the primary key finds each first one without a walk.
    of_series = (
        select(func.min(rollups.c.starts_at))
        .where(rollups.c.width_s == width_s, rollups.c.series == rollup_series.c.id)
        .scalar_subquery()
    )
    query = select(of_series.label("starts_at")).select_from(rollup_series)
    first = query.where(*_of(rollup_series, source)).subquery()
    starts_at: float | None = connection.execute(select(func.min(first.c.starts_at))).scalar()
    return starts_at


def selected(table: FromClause, selection: Selection) -> list[ColumnElement[bool]]:
    """Conditions for rows of the selected agent, engine, model, tenant; of any objective."""
    return [
        table.c[name] == getattr(selection, name)
        for name in ("agent", "engine", "model", "tenant")
        if getattr(selection, name) is not None
    ]


# Rollups are kept this much longer than windows may be, so that the first one of a window is there
# until the query ends.
_SPARE_S = 7200

# SQLite takes at most 32766 parameters in a statement.
SERIES_PER_READ = 5000

# Read vectors as they are. PostgreSQL sends them in binary, as text they are twice as long.
# ClickHouse would take them for text.
BINARY: Mapping[str, Any] = {"binary": True, "query_formats": {"String": "bytes"}}

Group = TypeVar("Group", bound=Hashable)

# What the rows of a query are grouped by: a field of their series, their start, or nothing.
GroupBy = Dimension | Literal["starts_at"] | None


class RollupRange(NamedTuple):
    """The rollups of one width that start in a half-open range of Unix seconds."""

    width_s: int
    from_s: int
    until_s: int


class RollupRow(NamedTuple):
    """The figures of one rollup or change; `gone` ones are subtracted."""

    starts_at: int
    series: Series
    gone: bool
    figures: Sequence[bytes | None]
    table: str = rollups.name


def cover(from_s: int, until_s: int, widths_s: Sequence[int] = WIDTHS_S) -> tuple[RollupRange, ...]:
    """The widest rollups that cover a window, each second once.

    The window's edges are multiples of the first width, and each width divides the next.
    """
    if from_s >= until_s:
        return ()
    *narrower, widest = widths_s
    if not narrower:
        return (RollupRange(widest, from_s, until_s),)
    inside_from = -(-from_s // widest) * widest
    inside_until = until_s // widest * widest
    if inside_from >= inside_until:
        return cover(from_s, until_s, narrower)
    return (
        *cover(from_s, inside_from, narrower),
        RollupRange(widest, inside_from, inside_until),
        *cover(inside_until, until_s, narrower),
    )


class RollupQueries:
    """Queries sums of requests. Raises StoreUnavailable where the database does not answer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = for_reading(engine)
        self._first_data_at: dict[DataSource, float] = {}

    def data_from(self, window: Window, source: DataSource) -> float | None:
        """When the data begins, of one agent, engine or of all; None without any data.

        A begin before the window may be an earlier query's, though retention has moved it on.
        """
        known = self._first_data_at.get(source)
        if known is not None and known <= window.from_s:
            return known
        with reading(self._engine) as connection:
            first = self._first_data(connection, source)
        if first is not None:
            self._first_data_at[source] = first
        return first

    def _first_data(self, connection: Connection, source: DataSource) -> float | None:
        return first_data_at(connection, source)

    def grid_s(self, age_s: float) -> int:
        """The grid, in seconds, of windows that began so long ago: of the rollups still kept."""
        kept = (width for width, keep_s in KEEP_S.items() if age_s < keep_s - _SPARE_S)
        return next(kept, WIDTHS_S[-1])

    def kept_s(self, grid_s: int) -> float:
        """How long ago a window on this grid may begin at most."""
        return KEEP_S[grid_s] - _SPARE_S

    def tally(self, window: Window, selection: Selection) -> Tally:
        """The counts of the requests that ended in the window."""
        tallies = self._tallies(self._cover_of(window), selection, lambda _row: None)
        return tallies.get(None, Tally())

    def tallies_by_step(
        self, window: Window, step_s: int, selection: Selection
    ) -> dict[int, Tally]:
        """The counts of each step of the window, by the Unix second that the step starts at."""
        steps, ranges = self._steps_of(window, step_s)
        tallies = self._tallies(
            ranges,
            selection,
            lambda row: step_at(window, step_s, row.starts_at),
            group_by="starts_at",
        )
        return {start: tallies.get(start, Tally()) for start in steps}

    def tallies_by(
        self, dimension: Dimension, window: Window, selection: Selection
    ) -> dict[str | None, Tally]:
        """The counts of the requests that ended in the window, by engine, model and so on.

        None is the key of requests of which that is unknown. No tally is empty. Changes that are
        not folded yet may have more models and tenants than rollups: the rest of them is `other`.
        """
        groups: set[str | None] = set()

        def value_of(row: RollupRow) -> str | None:
            value: str | None = getattr(row.series, dimension) or None
            if value not in groups and len(groups) >= MAX_SERIES:
                return OTHER
            groups.add(value)
            return value

        return self._tallies(self._cover_of(window), selection, value_of, group_by=dimension)

    def verdicts_by_minute(self, window: Window) -> VerdictsByMinute:
        """Requests that met and missed, by objective and model, and by the minute they ended in."""
        _, ranges = self._steps_of(window, MINUTE_S)
        tallies = self._tallies(
            ranges,
            Selection(),
            lambda row: (row.starts_at // MINUTE_S * MINUTE_S, row.series.model or None),
            group_by="starts_at",
            columns=("counts",),
        )
        found: dict[tuple[str, str | None], dict[int, tuple[int, int]]] = defaultdict(dict)
        for (minute, model), tally in tallies.items():
            for objective in {name for name, _ in tally.verdicts} - {ALL_OBJECTIVES}:
                met, missed = (
                    tally.verdicts.get((objective, verdict), VerdictCounts()).requests
                    for verdict in (Verdict.MET, Verdict.MISSED)
                )
                found[objective, model][minute] = (met, missed)
        return found

    def names(self) -> dict[str, list[str]]:
        """The agents, engines, models and tenants of stored requests, at most MAX_SERIES of each.

        They are sorted.
        """
        with reading(self._engine) as connection:
            # Agents fold changes in their files.
            folding = connection.dialect.name == "sqlite"
            tables = (rollup_series, rollup_changes) if folding else (rollup_series,)
            return {name: _names(connection, tables, name) for name in NAMED}

    def _cover_of(self, window: Window) -> tuple[RollupRange, ...]:
        """The rollups of a window.

        Of a window that ends now the last day is read whole: narrow rollups would be many times as
        many. Only after a clock was set back, some requests end later.
        """
        from_s, until_s = window.from_s, _grid_end(window)
        if window.ends_now and not self._any_ends_from(until_s):
            until_s = ceil(window.until / DAY_S) * DAY_S
        return cover(from_s, until_s)

    def _steps_of(self, window: Window, step_s: int) -> tuple[range, tuple[RollupRange, ...]]:
        """The starts of the steps of a window, and the rollups of which no step cuts any."""
        fitting = [w for w in WIDTHS_S if not (step_s % w or window.from_s % w)] or [NARROW_S]
        steps = range(window.from_s, _grid_end(window), step_s)
        ends_s = steps.stop
        last_s = steps[-1] if steps else ends_s
        if window.ends_now and steps and not self._any_ends_from(ends_s):
            return steps, cover(window.from_s, last_s + step_s, fitting)
        return steps, (*cover(window.from_s, last_s, fitting), *cover(last_s, ends_s))

    def _any_ends_from(self, at_s: int) -> bool:
        """Whether any stored request ended at this Unix second or later."""
        # No request takes a day: a shared database reads the newest partitions alone.
        began = requests.c.started_at >= at_s - DAY_S
        query = select(requests.c.id).where(began, requests.c.ended_at >= at_s).limit(1)
        with reading(self._engine) as connection:
            return connection.execute(query).first() is not None

    def _tallies(
        self,
        ranges: Sequence[RollupRange],
        selection: Selection,
        group_of: Callable[[RollupRow], Group],
        *,
        group_by: GroupBy = None,
        columns: Sequence[str] = FIGURES,
    ) -> dict[Group, Tally]:
        sums: dict[Group, RollupSum] = defaultdict(RollupSum)
        for row in self._rows(ranges, selection, group_by, columns):
            try:
                sums[group_of(row)].add(row.series.judged_by, row.figures, gone=row.gone)
            except DAMAGED as error:
                UNREADABLE.add(row.table, series_key(row.series, row.starts_at), error)
        tallies = {group: rollup_sum.tally() for group, rollup_sum in sums.items()}
        return {group: tally for group, tally in tallies.items() if tally.requests}

    def _rows(
        self,
        ranges: Sequence[RollupRange],
        selection: Selection,
        group_by: GroupBy,
        columns: Sequence[str],
    ) -> Iterator[RollupRow]:
        """Rollups first: a change can only subtract what was added before.

        Rows that differ only in their input length may come as one, unless `group_by` is that.
        Figures that are not in `columns` are None.
        """
        if not ranges:
            return
        with reading(self._engine) as connection:
            series = selected_series(connection, selection)
            for each in ranges:
                yield from _of_rollups(
                    connection, each, series, _figures(rollups, columns), group_by
                )
            if connection.dialect.name == "sqlite":
                # Agents fold changes in their files.
                figures = _figures(rollup_changes, columns)
                yield from _of_changes(connection, ranges, selection, figures)


def _names(connection: Connection, tables: Sequence[Table], column: str) -> list[str]:
    """Texts of a column of these tables, sorted."""
    found: set[str] = set()
    for table in tables:
        known = table.c[column]
        query = select(known).where(known != "").distinct().order_by(known).limit(MAX_SERIES)
        found |= {name for name in connection.execute(query).scalars() if isinstance(name, str)}
    return sorted(found)[:MAX_SERIES]


def step_at(window: Window, step_s: int, at: int) -> int:
    """The start of the step of a window that a rollup belongs to, by the rollup's own start."""
    return window.from_s + (at - window.from_s) // step_s * step_s


def _grid_end(window: Window) -> int:
    """Where the narrow rollup that holds the window's last moment ends."""
    return ceil(window.until / NARROW_S) * NARROW_S


def selected_series(connection: Connection, selection: Selection) -> dict[int, Series]:
    """The selected series by row number."""
    query = select(rollup_series.c.id, *(rollup_series.c[name] for name in Series._fields)).where(
        *selected(rollup_series, selection)
    )
    series = {row_id: Series(*rest) for row_id, *rest in connection.execute(query)}
    return {row_id: each for row_id, each in series.items() if is_judged(each, selection)}


def _figures(table: Table, columns: Sequence[str]) -> list[ColumnElement[Any]]:
    """All figures of a table in order; those that are not among `columns` are null."""
    return [table.c[name] if name in columns else null().label(name) for name in FIGURES]


def _of_rollups(
    connection: Connection,
    wanted: RollupRange,
    series: Mapping[int, Series],
    figures: Sequence[ColumnElement[Any]],
    group_by: GroupBy,
) -> Iterator[RollupRow]:
    any_length = wanted.width_s in SUMMED_WIDTHS_S and group_by != "input_length"
    ids = [
        row_id for row_id, each in series.items() if (each.input_length == ANY_LENGTH) == any_length
    ]
    for first in range(0, len(ids), SERIES_PER_READ):
        query = select(rollups.c.series, rollups.c.starts_at, *figures).where(
            rollups.c.width_s == wanted.width_s,
            rollups.c.series.in_(ids[first : first + SERIES_PER_READ]),
            rollups.c.starts_at >= wanted.from_s,
            rollups.c.starts_at < wanted.until_s,
        )
        for row_id, starts_at, *found in connection.execute(query, execution_options=BINARY):
            yield RollupRow(starts_at, series[row_id], False, found)


def _of_changes(
    connection: Connection,
    ranges: Sequence[RollupRange],
    selection: Selection,
    figures: Sequence[ColumnElement[Any]],
) -> Iterator[RollupRow]:
    table = rollup_changes
    columns = (table.c[name] for name in ("starts_at", "gone", *Series._fields))
    query = select(*columns, *figures).where(
        *selected(table, selection),
        table.c.starts_at >= ranges[0].from_s,
        table.c.starts_at < ranges[-1].until_s,
    )
    for starts_at, gone, *rest in connection.execute(query.order_by(table.c.id)):
        series = Series(*rest[: len(Series._fields)])
        if is_judged(series, selection):
            found = rest[len(Series._fields) :]
            yield RollupRow(starts_at, series, gone, found, rollup_changes.name)


def is_judged(series: Series, selection: Selection) -> bool:
    """Whether the selected objective judged these requests; False for a series that is damaged."""
    try:
        if not all(isinstance(name, str) for name in series):
            raise ValueError("a name is no text")
        names = objective_names(series.judged_by)
    except DAMAGED as error:
        UNREADABLE.add(rollup_series.name, series_key(series), error)
        return False
    return selection.objective is None or selection.objective in names
