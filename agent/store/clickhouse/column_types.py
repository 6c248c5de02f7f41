"""The type in ClickHouse of each column that SQLAlchemy declares for the other databases."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Float, Integer, LargeBinary, String, Table
from sqlalchemy.types import TypeEngine

from agent.store.utc_timestamp import UtcTimestamp

# Columns with few different texts: LowCardinality stores each text once in a part.
_FEW_TEXTS = frozenset(
    (
        *("agent", "engine", "model", "tenant", "route", "service_name", "requested_model"),
        *("vantage", "status", "engine_status", "verdict", "verdicts", "cause", "finish_reason"),
        *("error", "workload", "kind", "confidence", "dialect", "gpu", "name", "problem"),
        *("method", "steps", "input_length", "judged_by", "objective", "limit_name", "file"),
    )
)
TIMESTAMP = "DateTime64(6, 'UTC')"
# The first match counts: BigInteger is a subclass of Integer.
_TYPES: tuple[tuple[type[TypeEngine[Any]], str], ...] = (
    (UtcTimestamp, TIMESTAMP),
    (Boolean, "Bool"),
    (BigInteger, "Int64"),
    (Integer, "Int32"),
    (Float, "Float64"),
    (String, "String"),
    # Any bytes are a String; BINARY of agent.store.rollup_queries reads them as they are.
    (LargeBinary, "String"),
)


def type_of(column: Column[Any]) -> str:
    """The type of a column; it is Nullable where the column is nullable."""
    plain = next(name for kind, name in _TYPES if isinstance(column.type, kind))
    if column.name == "id":
        plain = "Int64"
    if column.nullable:
        plain = f"Nullable({plain})"
    has_few = column.name in _FEW_TEXTS and isinstance(column.type, String)
    return f"LowCardinality({plain})" if has_few else plain


def types_of(table: Table) -> Mapping[str, str]:
    """The types of all columns of a table by name."""
    return {column.name: type_of(column) for column in table.c}
