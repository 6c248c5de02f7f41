"""What an agent's file and ClickHouse have, to compare."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine, Table, select

from agent.records.event import Confidence, Event, EventKind
from agent.store.rollup_queries import BINARY
from agent.store.rollups import FIGURES, RollupSum, Series
from agent.store.tables import (
    engine_minutes,
    engine_samples,
    events,
    gpu_samples,
    requests,
    rollup_series,
    rollups,
)
from tests.store.explaining import summed_causes
from tests.store.making import NOON, rollup_bytes

PUBLISHED = (requests, engine_samples, gpu_samples, events, engine_minutes)


def stored(engine: Engine, table: Table) -> Sequence[dict[str, Any]]:
    """All rows of a table, without the numbers that each database gives."""
    names = [column.name for column in table.c if column.name != "id"]
    with engine.connect() as connection:
        found = connection.execute(select(*(table.c[name] for name in names))).mappings()
        return sorted(({name: row[name] for name in names} for row in found), key=str)


def summed(shared: Engine) -> dict[tuple[Any, ...], tuple[bytes | None, ...]]:
    """The rollups of ClickHouse that have requests; series of several files are added up."""
    figures = [rollups.c[name] for name in FIGURES]
    query = select(rollups.c.width_s, rollups.c.starts_at, rollups.c.series, *figures)
    names = [rollup_series.c[name] for name in Series._fields]
    sums: dict[tuple[Any, ...], RollupSum] = defaultdict(RollupSum)
    with shared.connect() as connection:
        found = connection.execute(select(rollup_series.c.id, *names))
        series = {row_id: tuple(rest) for row_id, *rest in found}
        for width_s, starts_at, row_id, *vectors in connection.execute(
            query, execution_options=BINARY
        ):
            place = (width_s, starts_at, *series[row_id])
            sums[place].add(place[-1], vectors)
    return {
        place: tuple(each.figures(place[-1])[name] for name in FIGURES)
        for place, each in sums.items()
        if each.tally().requests
    }


def same_in_both(file: Engine, shared: Engine) -> None:
    """Rows, rollups and causes are equal."""
    for table in PUBLISHED:
        assert stored(file, table) == stored(shared, table), table.name
    assert summed(shared) == rollup_bytes(file)
    assert summed_causes(shared) == summed_causes(file)


def event(second: int) -> Event:
    return Event(
        at=NOON + second, engine="chat-0", kind=EventKind.RESTART, confidence=Confidence.CERTAIN
    )
