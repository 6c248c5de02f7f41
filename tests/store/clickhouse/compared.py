"""What a journal and ClickHouse have, to compare."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine, Table, select, text

from agent.records.event import Confidence, Event, EventKind
from agent.store.clickhouse.vector_rows import encoded_from
from agent.store.rollups import FIGURES, Series
from agent.store.tables import engine_minutes, engine_samples, events, gpu_samples, requests
from tests.store.explaining import summed_causes
from tests.store.making import NOON, rollup_bytes

NOTED = (requests, engine_samples, gpu_samples, events, engine_minutes)


def stored(engine: Engine, table: Table) -> Sequence[dict[str, Any]]:
    """All rows of a table, without the numbers that each database gives."""
    names = [column.name for column in table.c if column.name != "id"]
    with engine.connect() as connection:
        found = connection.execute(select(*(table.c[name] for name in names))).mappings()
        return sorted(({name: row[name] for name in names} for row in found), key=str)


def summed(engine: Engine) -> dict[tuple[Any, ...], tuple[bytes | None, ...]]:
    """The rollups of ClickHouse as another database would store them."""
    place = ("width_s", "starts_at", *Series._fields)
    inner = (
        f"SELECT {', '.join(place)}, figure, place, sum(n) AS number FROM rollups "
        f"GROUP BY {', '.join(place)}, figure, place HAVING number != 0"
    )
    query = (
        f"SELECT {', '.join(place)}, figure, groupArray(place), groupArray(number) "
        f"FROM ({inner}) GROUP BY {', '.join(place)}, figure"
    )
    vectors: dict[tuple[Any, ...], dict[str, bytes | None]] = {}
    with engine.connect() as connection:
        for *key, figure, places, numbers in connection.execute(text(query)):
            vectors.setdefault(tuple(key), {})[figure] = encoded_from(places, numbers)
    return {key: tuple(found.get(name) for name in FIGURES) for key, found in vectors.items()}


def of_fleet(engine: Engine, table: str) -> Sequence[tuple[Any, ...]]:
    """The sums of a table of rollups over all agents and engines."""
    place = "width_s, starts_at, model, tenant, input_length, judged_by, figure, place"
    query = (
        f"SELECT {place}, sum(n) AS number FROM {table} GROUP BY {place} "
        f"HAVING number != 0 ORDER BY {place}"
    )
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(query))]


def causes(engine: Engine) -> dict[tuple[Any, ...], list[Any]]:
    place = ("width_s", "starts_at", "tenant", "objective", "limit_name", "cause")
    query = (
        f"SELECT {', '.join(place)}, sum(requests) AS counted, sum(top_requests), "
        f"round(sum(excess_s), 6) FROM cause_rollups GROUP BY {', '.join(place)} HAVING counted > 0"
    )
    with engine.connect() as connection:
        return {tuple(row[:6]): [*row[6:]] for row in connection.execute(text(query))}


def same_in_both(journal: Engine, shared: Engine) -> None:
    for table in NOTED:
        assert stored(journal, table) == stored(shared, table), table.name
    assert summed(shared) == rollup_bytes(journal)
    assert of_fleet(shared, "fleet_rollups") == of_fleet(shared, "rollups")
    assert causes(shared) == summed_causes(journal)


def event(second: int) -> Event:
    return Event(
        at=NOON + second, engine="chat-0", kind=EventKind.RESTART, confidence=Confidence.CERTAIN
    )
