"""Figures of many requests: rollups and what is not folded into them yet, added up."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Connection, Engine, Table, func, select
from sqlalchemy.exc import SQLAlchemyError

from agent.analysis.difference import difference
from agent.analysis.quantiles import BinRun, Bins
from agent.analysis.tally import MEASURES, Tally
from agent.errors import StoreUnavailable
from agent.records.queries import Dimension, Selection, Window
from agent.store.connection import cause, for_reading
from agent.store.rollups import (
    ANY_LENGTH,
    DAY_S,
    KEEP_S,
    NARROW_S,
    SUMMED_WIDTHS_S,
    WIDTHS_S,
    Stretch,
    cover,
)
from agent.store.summing import BinSum, CountSum
from agent.store.tables import rollup_changes, rollup_series, rollups

# Kept longer than asked for by so much, so that the first rollup of a window is there to the end.
_SPARE_S = 7200

_SERIES = ("engine", "model", "tenant", "input_length", "objectives")

Group = TypeVar("Group", bound=Hashable)


class Row(NamedTuple):
    """Some figures of one rollup or change; `series` gives what they have in common."""

    starts_at: int
    series: Mapping[str, str]
    gone: bool
    figures: Sequence[bytes | None]


class Figures:
    """Asks for sums of requests. Raises StoreUnavailable where the database does not answer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = for_reading(engine)

    def grid_s(self, length_s: float) -> int:
        """The grid, in seconds, on which a window of this length must begin and end."""
        kept = (width for width, keep_s in KEEP_S.items() if length_s < keep_s - _SPARE_S)
        return next(kept, WIDTHS_S[-1])

    def tally(self, window: Window, selection: Selection) -> Tally:
        """The counts of the requests that ended in the window."""
        told = self._tallies(_all_of(window), selection, lambda _row: None)
        return told.get(None, Tally())

    def tallies_by_step(
        self, window: Window, step_s: int, selection: Selection
    ) -> dict[int, Tally]:
        """The counts of each step of the window, by the Unix second that the step starts at."""

        def step_of(row: Row) -> int:
            return window.from_s + (row.starts_at - window.from_s) // step_s * step_s

        fitting = [w for w in WIDTHS_S if not (step_s % w or window.from_s % w)] or [NARROW_S]
        steps = range(window.from_s, grid_end(window), step_s)
        until_s = steps.stop
        if window.ends_now and steps:
            until_s = steps[-1] + step_s
        stretches = cover(window.from_s, until_s, fitting)
        told = self._tallies(stretches, selection, step_of)
        return {start: told.get(start, Tally()) for start in steps}

    def tallies_by(
        self, dimension: Dimension, window: Window, selection: Selection
    ) -> dict[str | None, Tally]:
        """The counts of the requests that ended in the window, by engine, model and so on.

        None is the key of those of which it is not known; nothing without requests is told.
        """
        by_length = dimension == "input_length"

        def value_of(row: Row) -> str | None:
            return row.series[dimension] or None

        return self._tallies(_all_of(window), selection, value_of, by_length=by_length)

    def bins_by(
        self, dimension: Dimension, measure: str, window: Window, selection: Selection
    ) -> dict[str | None, Bins]:
        """The bins of one of MEASURES alone, by engine, model and so on: the way to percentiles.

        Keys are those of `tallies_by`; what has no such figure is left out.
        """
        sums: dict[tuple[str, bool], BinSum] = {}
        by_length = dimension == "input_length"
        for row in self._rows(_all_of(window), selection, (measure,), by_length=by_length):
            if row.figures[0] is not None:
                group = (row.series[dimension], row.gone)
                if group not in sums:
                    sums[group] = BinSum()
                sums[group].add(row.figures[0])
        told = {}
        for (value, gone), summed in sums.items():
            if not gone:
                less = sums[value, True].bins() if (value, True) in sums else {}
                left = {index: n - less.get(index, 0) for index, n in summed.bins().items()}
                told[value or None] = {index: n for index, n in left.items() if n > 0}
        return {value: bins for value, bins in told.items() if bins}

    def _tallies(
        self,
        stretches: Sequence[Stretch],
        selection: Selection,
        group_of: Callable[[Row], Group],
        *,
        by_length: bool = False,
    ) -> dict[Group, Tally]:
        sums: dict[Group, _Sum] = {}
        taken_back: dict[Group, _Sum] = {}
        figures = ("counts", *MEASURES)
        for row in self._rows(stretches, selection, figures, by_length=by_length):
            into = taken_back if row.gone else sums
            group = group_of(row)
            if group not in into:
                into[group] = _Sum()
            into[group].add(row)
        tallies = {group: summed.tally() for group, summed in sums.items()}
        for group, summed in taken_back.items():
            if group in tallies:
                tallies[group] = difference(tallies[group], summed.tally())
        return {group: tally for group, tally in tallies.items() if tally.requests}

    def _rows(
        self,
        stretches: Sequence[Stretch],
        selection: Selection,
        figures: Sequence[str],
        *,
        by_length: bool,
    ) -> Iterator[Row]:
        if not stretches:
            return
        try:
            with self._engine.connect() as connection:
                chosen = _Chosen(selection, figures, by_length=by_length)
                yield from _of_changes(connection, stretches, chosen)
                yield from _of_rollups(connection, stretches, chosen)
        except SQLAlchemyError as error:
            raise StoreUnavailable(f"the database does not answer: {cause(error)}") from error


class _Sum:
    """Figures that add up."""

    def __init__(self) -> None:
        self._counts = CountSum()
        self._bins = {name: BinSum() for name in MEASURES}

    def add(self, row: Row) -> None:
        counts, *runs = row.figures
        assert counts is not None
        self._counts.add(counts, row.series["objectives"])
        for summed, run in zip(self._bins.values(), runs, strict=True):
            if run is not None:
                summed.add(run)

    def tally(self) -> Tally:
        """All of them."""
        bins = {name: summed.bins() for name, summed in self._bins.items()}
        tally = self._counts.tally()
        tally.bins = {name: BinRun.of(told) for name, told in bins.items() if told}
        return tally


class _Chosen(NamedTuple):
    """What to read."""

    selection: Selection
    figures: Sequence[str]
    by_length: bool


def grid_end(window: Window) -> int:
    """Where the narrow rollup that holds the window's last moment ends."""
    return ceil(window.until / NARROW_S) * NARROW_S


def _all_of(window: Window) -> Sequence[Stretch]:
    """The rollups to read for a window.

    Of one that ends now the last day is read as a whole: narrow ones would be many times as many.
    """
    until_s = ceil(window.until / DAY_S) * DAY_S if window.ends_now else grid_end(window)
    return cover(window.from_s, until_s)


def _of_changes(
    connection: Connection, stretches: Sequence[Stretch], chosen: _Chosen
) -> Iterator[Row]:
    table = rollup_changes
    query = select(
        table.c.starts_at,
        table.c.gone,
        *(table.c[name] for name in _SERIES),
        *(table.c[name] for name in chosen.figures),
    ).where(
        table.c.starts_at >= stretches[0].from_s,
        table.c.starts_at < stretches[-1].until_s,
        *_of_selection(table, chosen.selection),
    )
    for starts_at, gone, *rest in connection.execute(query):
        series = dict(zip(_SERIES, rest[: len(_SERIES)], strict=True))
        yield Row(starts_at, series, gone, rest[len(_SERIES) :])


def _of_rollups(
    connection: Connection, stretches: Sequence[Stretch], chosen: _Chosen
) -> Iterator[Row]:
    """Of each series in turn: those in question are few, however many rollups there are."""
    table = rollup_series
    query = select(table.c.id, *(table.c[name] for name in _SERIES)).where(
        *_of_selection(table, chosen.selection)
    )
    series = {
        number: dict(zip(_SERIES, rest, strict=True)) for number, *rest in connection.execute(query)
    }
    for stretch in stretches:
        for number, starts_at, *figures in connection.execute(_in_stretch(stretch, chosen)):
            yield Row(starts_at, series[number], False, figures)


def _in_stretch(stretch: Stretch, chosen: _Chosen) -> Any:
    any_length = stretch.width_s in SUMMED_WIDTHS_S and not chosen.by_length
    length = rollup_series.c.input_length
    wanted = select(rollup_series.c.id).where(
        length == ANY_LENGTH if any_length else length != ANY_LENGTH,
        *_of_selection(rollup_series, chosen.selection),
    )
    return select(
        rollups.c.series, rollups.c.starts_at, *(rollups.c[name] for name in chosen.figures)
    ).where(
        rollups.c.width_s == stretch.width_s,
        rollups.c.series.in_(wanted),
        rollups.c.starts_at >= stretch.from_s,
        rollups.c.starts_at < stretch.until_s,
    )


def _of_selection(table: Table, selection: Selection) -> list[ColumnElement[bool]]:
    conditions = [
        table.c[name] == getattr(selection, name)
        for name in ("engine", "model", "tenant")
        if getattr(selection, name) is not None
    ]
    if selection.objective is not None:
        names = "," + table.c.objectives + ","
        conditions.append(holds(names, f",{selection.objective},"))
    return conditions


def holds(column: ColumnElement[str], sought: str) -> ColumnElement[bool]:
    """Whether the text is in the column, letter by letter: SQLite's LIKE ignores case."""
    return func.replace(column, sought, "") != column
