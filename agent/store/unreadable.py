"""Rows that cannot be read: they are left out, counted and named, and everything else goes on.

A disk, another program or a later version of the agent can leave a row that this version cannot
read. Without it, a query of many rows still has the figures of all others.
"""

import logging
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import cache
from typing import Any, Literal, TypeVar

import msgspec
from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    Engine,
    Float,
    Integer,
    Select,
    String,
    Table,
    Text,
    case,
    func,
    select,
)

from agent.catalog.definitions import Verdict
from agent.records.event import Confidence
from agent.records.request import Status, Vantage
from agent.store.connection import read_all
from agent.store.tables import agents, events, gpu_samples, metadata, objectives, requests
from agent.store.utc_timestamp import UtcTimestamp

_LOG = logging.getLogger(__name__)

# What reading the content of a damaged row raises.
DAMAGED = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError),
    *(struct.error, msgspec.MsgspecError),
)

# The keys that are kept, of each table; more rows are no longer told apart.
MOST_KEPT = 1000

Key = tuple[Any, ...]
Result = TypeVar("Result")


class UnreadableRows:
    """The rows that could not be read since the start. Safe to use from several threads."""

    def __init__(self) -> None:
        self._keys: dict[str, set[Key]] = {}
        self._lock = threading.Lock()

    def add(self, table: str, key: Mapping[str, Any], error: Exception | str) -> None:
        """Count a row once, and log the first one of its table."""
        values = tuple(key.values())
        with self._lock:
            keys = self._keys.setdefault(table, set())
            is_first, is_new = not keys, values not in keys and len(keys) < MOST_KEPT
            if is_new:
                keys.add(values)
        if is_first:
            named = ", ".join(f"{name} {value!r}" for name, value in key.items())
            _LOG.warning(
                "a row of %s cannot be read and is left out (%s): %s; others of this table are "
                "only counted",
                table,
                named[:500],
                str(error)[:200],
            )

    def count(self, table: str) -> int:
        """How many rows of a table could not be read since the start."""
        with self._lock:
            return len(self._keys.get(table, ()))

    def status(self) -> str | None:
        """A sentence for /readyz; None without any."""
        with self._lock:
            counts = {table: len(keys) for table, keys in self._keys.items() if keys}
        if not counts:
            return None
        shown = ", ".join(f"{count} of {table}" for table, count in sorted(counts.items()))
        return f"rows that cannot be read are left out: {shown}"


UNREADABLE = UnreadableRows()

# All tables that may have such rows, for the metric.
_OF_PUBLISHING = frozenset(("publishing", "published_files", "deleted_requests"))
TABLES = tuple(sorted(metadata.tables.keys() - _OF_PUBLISHING))


def readable(
    table: Table, rows: Iterable[Any], read: Callable[[Mapping[str, Any]], Result]
) -> list[Result]:
    """What `read` makes of each row that can be read; the others are counted."""
    found = []
    for row in rows:
        mapping = row if isinstance(row, Mapping) else row._mapping
        try:
            found.append(read(mapping))
        except DAMAGED as error:
            UNREADABLE.add(table.name, key_of_row(mapping), error)
    return found


def readable_rows(engine: Engine, table: Table, query: Select[Any]) -> Sequence[Any]:
    """The rows of a query for whole rows of a table, without those that the driver cannot read.

    Raises StoreUnavailable.
    """
    try:
        return read_all(engine, query)
    except DAMAGED:
        pass
    key = [table.c[column.name] for column in table.primary_key.columns]
    found: list[Any] = []
    for values in read_all(engine, query.with_only_columns(*key, maintain_column_froms=True)):
        conditions = [column == value for column, value in zip(key, values, strict=True)]
        try:
            found += read_all(engine, select(table).where(*conditions))
        except DAMAGED as error:
            UNREADABLE.add(table.name, dict(values._mapping), error)
    return found


_KEY_COLUMNS = ("agent", "engine", "gpu", "name", "id", "trace_id", "span_id", "starts_at", "at")


def key_of_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that name a row of any table."""
    return {name: row[name] for name in _KEY_COLUMNS if name in row}


# The range of a datetime, in Unix seconds.
_FIRST_S, _LAST_S = -62135596800.0, 253402300799.0
_LARGEST = 1e300


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Decimal)) and -_LARGEST <= value <= _LARGEST


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, Decimal)) and value == int(value)


def _is_time(value: Any) -> bool:
    return isinstance(value, float) and value >= _FIRST_S and value <= _LAST_S


def _is_flag(value: Any) -> bool:
    return isinstance(value, (bool, int)) and value in (0, 1)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_CHECKS: Mapping[type, Callable[[Any], bool]] = {
    UtcTimestamp: _is_time,
    Boolean: _is_flag,
    Float: _is_number,
    BigInteger: _is_whole,
    Integer: _is_whole,
    Text: _is_text,
    String: _is_text,
}

# Texts with few values.
_ALLOWED: Mapping[tuple[str, str], frozenset[str]] = {
    (requests.name, "vantage"): frozenset(Vantage),
    (requests.name, "status"): frozenset(Status),
    (requests.name, "engine_status"): frozenset(Status),
    (requests.name, "verdict"): frozenset(Verdict),
    (events.name, "confidence"): frozenset(Confidence),
}


class _StoredShare(msgspec.Struct):
    objective: str
    limit: str
    cause: str
    excess_s: float | None
    evidence: list[str]


class _StoredExplanation(msgspec.Struct):
    sources: list[str]
    shares: list[_StoredShare]


class _LabelledValue(msgspec.Struct):
    labels: list[str]
    value: float | None


_Facts = dict[str, float | list[_LabelledValue] | None]


class _StoredProcess(msgspec.Struct):
    pid: int
    memory_bytes: int | None


class _StoredInstance(msgspec.Struct):
    facts: _Facts
    uuid: str = ""
    name: str = ""
    gpu_instance: int | None = None
    compute_instance: int | None = None
    gpu_slices: int | None = None
    processes: list[_StoredProcess] | None = None


class _StoredDefinition(msgspec.Struct):
    target: float
    window_s: float
    max_error_ratio: float | None
    min_output_tokens_per_s: float | None


class _StoredEngine(msgspec.Struct):
    name: str
    model: str | None = None
    dialect: str | None = None
    role: str | None = None
    read_at: float | None = None
    up: bool | None = None
    running: float | None = None
    waiting: float | None = None
    kv_cache_usage: float | None = None
    state: str | None = None
    state_since: float | None = None
    state_why: str | None = None


def finite(column: ColumnElement[float]) -> ColumnElement[float | None]:
    """The column in SQL, null where it is no finite number: one row would spoil a whole sum."""
    # In PostgreSQL NaN is larger than any number.
    return case((func.abs(column) <= _LARGEST, column))


# What JSON in a column must hold.
_JSON: Mapping[tuple[str, str], Any] = {
    (requests.name, "verdicts"): dict[str, Literal["met", "missed", "undetermined"]],
    (requests.name, "explanation"): _StoredExplanation,
    (requests.name, "gaps"): dict[str, int],
    (events.name, "evidence"): dict[str, Any],
    (objectives.name, "definition"): _StoredDefinition,
    (gpu_samples.name, "facts"): _Facts,
    (gpu_samples.name, "processes"): list[_StoredProcess],
    (gpu_samples.name, "mig_instances"): list[_StoredInstance],
    (agents.name, "engines"): list[_StoredEngine],
}


def check_row(table: Table, row: Mapping[str, Any]) -> None:
    """Raise ValueError for a row with a value that its column cannot have."""
    for name, nullable, check, allowed in _columns_of(table):
        if name not in row:
            continue
        value = row[name]
        if value is None:
            if not nullable:
                raise ValueError(f"{name} is null")
        elif not check(value) or (allowed is not None and value not in allowed):
            raise ValueError(f"{name} is {str(value)[:40]!r}")


@cache
def _columns_of(
    table: Table,
) -> Sequence[tuple[str, bool | None, Callable[[Any], bool], frozenset[str] | None]]:
    return [
        (
            column.name,
            column.nullable,
            _CHECKS[type(column.type)],
            _ALLOWED.get((table.name, column.name)),
        )
        for column in table.c
    ]


def json_of(table: Table, column: str, text: str) -> Any:
    """The content of a JSON column. Raises one of DAMAGED where it is not what it must be."""
    content = msgspec.json.decode(text)
    msgspec.convert(content, _JSON[table.name, column])
    return content


def json_columns(table: Table) -> list[str]:
    """The columns of a table that hold JSON."""
    return [column for name, column in _JSON if name == table.name]
