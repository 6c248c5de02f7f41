"""The upkeep of old rows in ClickHouse: its server deletes them, each agent merges its minutes."""

from typing import Any

from sqlalchemy import Engine, select

from agent.store.clickhouse.connecting import insert_rows, using
from agent.store.clickhouse.schema import DELETED, keep_for, types_of
from agent.store.connection import open_engine, read_all
from agent.store.minute_sums import MERGED, MERGES_PER_SLICE, as_row, in_parts, summed
from agent.store.tables import engine_minutes
from agent.store.time_limits import UPKEEP_S
from agent.store.utc_timestamp import UtcTimestamp

_MINUTE = engine_minutes.c
_TIMES = [column.name for column in _MINUTE if isinstance(column.type, UtcTimestamp)]
_TYPES = {**types_of(engine_minutes), **DELETED}
_REFUSED = "the database did not take the write"


class ClickHouseUpkeep:
    """The jobs of an agent on a shared ClickHouse. Raises StoreUnavailable."""

    def __init__(
        self, url: str, agent: str, *, keep_requests_s: float, keep_rollups_s: float
    ) -> None:
        self._engine = open_engine(url, statement_s=UPKEEP_S)
        self._agent = agent
        self._kept_s = (keep_requests_s, keep_rollups_s)
        self._ttl_is_set = False

    def expire(self, now: float) -> None:
        """Set once how long the server keeps rows, and merge old minutes."""
        if not self._ttl_is_set:
            with using(self._engine, _REFUSED) as client:
                keep_for(client, *self._kept_s)
            self._ttl_is_set = True
        merge_minutes_there(self._engine, self._agent, now)

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()


def merge_minutes_there(engine: Engine, agent: str, now: float) -> int:
    """Merge an agent's old minutes into hours, and old hours into days; returns how many it made.

    The row of an hour or day and the tombstones of the rows that it replaces are one block.
    """
    merged = 0
    for width_s, kept_s in MERGED:
        slice_of = MERGES_PER_SLICE
        while slice_of == MERGES_PER_SLICE:
            parts = read_all(engine, in_parts(agent, width_s, now - kept_s))
            for name, begin in parts:
                _merge(engine, agent, name, int(begin), width_s)
            slice_of = len(parts)
            merged += slice_of
    return merged


def _merge(engine: Engine, agent: str, name: str, begin: int, width_s: int) -> None:
    within = (
        _MINUTE.agent == agent,
        _MINUTE.engine == name,
        _MINUTE.starts_at >= begin,
        _MINUTE.starts_at < begin + width_s,
    )
    found = read_all(engine, select(_MINUTE.starts_at, _MINUTE.changed).where(*within))
    # Above the versions that are there.
    version = {"changed": max(changed for _, changed in found) + 1}
    rows = [as_row(each._mapping) | version for each in read_all(engine, summed(within))]
    gone = {starts_at for starts_at, _ in found} - {row["starts_at"] for row in rows}
    tombstones = [{**rows[0], "starts_at": starts_at} for starts_at in sorted(gone)]
    values = [
        [*_in_microseconds(row), is_deleted]
        for is_deleted, some in enumerate((rows, tombstones))
        for row in some
    ]
    with using(engine, _REFUSED) as client:
        insert_rows(client, engine_minutes.name, [*_TYPES], [*_TYPES.values()], values)


def _in_microseconds(row: dict[str, Any]) -> list[Any]:
    """The values of a row in the order of the columns."""
    row = row | {name: round(row[name] * 1e6) for name in _TIMES}
    return [row[column.name] for column in engine_minutes.c]
