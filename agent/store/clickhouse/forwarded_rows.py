"""Writes a batch of a journal to ClickHouse: rows that replace each other, and sums as one block.

Rows may be written any number of times. Sums may not: the server drops a block whose token it
knows. A mark follows the block: a row with the number up to which the server has the run.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import Table

from agent.store.clickhouse.column_types import TIMESTAMP, types_of
from agent.store.clickhouse.connecting import insert_rows
from agent.store.clickhouse.schema import FORWARDED_COLUMNS
from agent.store.clickhouse.vector_rows import rows_of
from agent.store.journal.backlog import FORWARDED, NotedRows, Row
from agent.store.journal.noting import CAUSE_DIFFERENCES, ROLLUP_DIFFERENCES
from agent.store.rollups import FIGURES, Series
from agent.store.tables import engine_minutes, engine_samples, events, gpu_samples, requests
from agent.store.utc_timestamp import UtcTimestamp

# The `id` of a row is its rowid in the journal, followed by bits that differ between agents.
_AGENT_BITS = 20

_NUMBERED = (requests, engine_samples, gpu_samples, events)
_VERSIONED = (requests, engine_minutes)
_VERSION_TYPES = {"row_version": "UInt64", "is_deleted": "UInt8"}
_TOMBSTONE = {"trace_id": "String", "span_id": "String", "started_at": TIMESTAMP} | _VERSION_TYPES


class _Target:
    """A table of ClickHouse that rows of the journal are copied into."""

    def __init__(self, table: Table) -> None:
        self.name = table.name
        types = types_of(table)
        numbered, versioned = table in _NUMBERED, table in _VERSIONED
        copied = FORWARDED[table.name]
        wanted = {"id": "Int64"} if numbered else {}
        wanted |= {name: types[name] for name in copied}
        wanted |= _VERSION_TYPES if versioned else {}
        self.columns, self.types = [*wanted], [*wanted.values()]
        self._numbered, self._versioned = numbered, versioned
        self._times = [
            place
            for place, name in enumerate(copied)
            if isinstance(table.c[name].type, UtcTimestamp)
        ]

    def row(self, found: Row, agent_bits: int, version: int) -> list[Any]:
        """The values to insert for a row of the journal, whose first value is its rowid."""
        number, *values = found
        for place in self._times:
            if values[place] is not None:
                values[place] = _microseconds(values[place])
        row_id = [number << _AGENT_BITS | agent_bits] if self._numbered else []
        return [*row_id, *values, *((version, 0) if self._versioned else ())]


_TARGETS = [
    _Target(table) for table in (requests, engine_minutes, engine_samples, gpu_samples, events)
]


def write_rows(client: Any, batch: NotedRows, agent: str, version: int) -> None:
    """Write the rows of a batch, and tombstones of deleted requests."""
    bits = zlib.crc32(agent.encode()) % 2**_AGENT_BITS
    for target in _TARGETS:
        if batch.has(target.name):
            rows = [target.row(row, bits, version) for row in batch.numbered(target.name)]
            insert_rows(client, target.name, target.columns, target.types, rows)
    gone = [
        (trace, span, _microseconds(began), version, 1) for trace, span, began in batch.gone_at()
    ]
    insert_rows(client, requests.name, [*_TOMBSTONE], [*_TOMBSTONE.values()], gone)


def write_sums(client: Any, batch: NotedRows | None, run: str, last: int) -> None:
    """Send the differences of a batch as one block; nothing without a batch.

    When the block is sent again, each table that has it drops it. A table whose view had failed
    takes it then.
    """
    if batch is not None:
        differences = batch.rows(ROLLUP_DIFFERENCES), batch.rows(CAUSE_DIFFERENCES)
        rows = [*_rollups(differences[0]), *_causes(differences[1])]
        _insert(client, rows, run, last, token=f"{run}:{last}")


def write_mark(client: Any, run: str, last: int) -> None:
    """Write the mark: the tables, also those of the views, have the run up to a number."""
    _insert(client, [{"what": "mark"}], run, last, token=f"{run}:{last}:mark")


def _insert(
    client: Any, rows: Sequence[Mapping[str, Any]], run: str, last: int, *, token: str
) -> None:
    whole = [{**_NOTHING, **row, "run": run, "last": last} for row in rows]
    insert_rows(
        client,
        "forwarded",
        [*FORWARDED_COLUMNS],
        [*FORWARDED_COLUMNS.values()],
        [[row[name] for name in FORWARDED_COLUMNS] for row in whole],
        insert_deduplication_token=token,
        deduplicate_blocks_in_dependent_materialized_views=1,
        materialized_views_ignore_errors=0,
        # A sender with a wrong clock sends requests of many months, each in its own partition.
        max_partitions_per_insert_block=0,
    )


_EMPTY: Mapping[str, Any] = {"String": "", "Array": [], "Int": 0, "UInt": 0, "Nullable": None}


def _empty(type_name: str) -> Any:
    if type_name.startswith("LowCardinality"):
        return ""
    return next(value for kind, value in _EMPTY.items() if type_name.startswith(kind))


_NOTHING = {name: _empty(type_name) for name, type_name in FORWARDED_COLUMNS.items()}
_ROLLUP = FORWARDED[ROLLUP_DIFFERENCES]
_CAUSE = FORWARDED[CAUSE_DIFFERENCES]


def _rollups(differences: Iterator[Row]) -> Iterator[Mapping[str, Any]]:
    for row in differences:
        named = dict(zip(_ROLLUP, row, strict=True))
        figures, places, numbers = rows_of(
            FIGURES, [named[each] for each in FIGURES], gone=bool(named["gone"])
        )
        yield {
            "what": "rollup",
            "starts_at": named["starts_at"],
            **{name: named[name] for name in Series._fields},
            "figures": figures,
            "places": places,
            "numbers": numbers,
        }


def _causes(differences: Iterator[Row]) -> Iterator[Mapping[str, Any]]:
    for row in differences:
        yield {"what": "cause", **dict(zip(_CAUSE, row, strict=True))}


@lru_cache(maxsize=4096)
def _second(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 1_000_000


def _microseconds(text: str) -> int:
    """Unix microseconds of a timestamp of the journal, whose text has six decimal places."""
    return _second(text[:19]) + int(text[20:] or 0)


def stored_until(client: Any, run: str) -> int:
    """The last mark of a run: the number up to which the server has it; 0 without a mark."""
    query = "SELECT max(last) FROM forwarded WHERE run = {run:String} AND what = 'mark'"
    found: Sequence[Any] = client.query(query, {"run": run}).first_row
    return int(found[0] or 0)


def is_stored(client: Any, run: str, last: int) -> bool:
    """Whether the table `forwarded` has the block of a batch."""
    query = "SELECT count() FROM forwarded WHERE run = {run:String} AND last = {last:Int64}"
    found: Sequence[Any] = client.query(query, {"run": run, "last": last}).first_row
    return bool(found[0])
