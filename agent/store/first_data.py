"""When the stored data begins: the first moment of which any table still knows something."""

from collections.abc import Callable, Iterator
from functools import partial
from math import isfinite
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, func, select

from agent.records.queries import DataSource
from agent.store.rollups import WIDTHS_S
from agent.store.tables import (
    engine_minutes,
    engine_samples,
    rollup_changes,
    rollup_series,
    rollups,
)


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
