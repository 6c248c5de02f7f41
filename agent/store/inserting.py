"""Inserting requests once, however often they are sent, at the speed of the driver."""

from collections.abc import Callable, Mapping, Sequence

from sqlalchemy import BigInteger, Connection, DateTime, Float, Integer, String, Text, text

from agent.records.objective import JudgedRequest
from agent.store.rows import COLUMNS, postgres_columns, sqlite_rows
from agent.store.tables import requests

Key = tuple[str, str]

_NAMES = ", ".join(COLUMNS)
SQLITE_INSERT = (
    f"INSERT INTO requests ({_NAMES}) VALUES ({', '.join('?' * len(COLUMNS))}) "
    "ON CONFLICT (trace_id, span_id) DO NOTHING"
)

# The first that fits counts: Text and BigInteger are kinds of String and Integer.
_POSTGRES_TYPES = (
    (Text, "text"),
    (String, "text"),
    (BigInteger, "bigint"),
    (Integer, "integer"),
    (Float, "double precision"),
    (DateTime, "timestamptz"),
)


def _postgres_type(column: str) -> str:
    kind = requests.c[column].type
    implementation = getattr(kind, "impl_instance", kind)
    return next(name for cls, name in _POSTGRES_TYPES if isinstance(implementation, cls))


_POSTGRES_INSERT = (
    f"INSERT INTO requests ({_NAMES}) SELECT * FROM unnest("
    + ", ".join(f"%s::{_postgres_type(column)}[]" for column in COLUMNS)
    + ") ON CONFLICT (trace_id, span_id) DO NOTHING RETURNING trace_id, span_id"
)


def _key(item: JudgedRequest) -> Key:
    return (item.record.trace_id, item.record.span_id)


def insert_new(connection: Connection, judged: Sequence[JudgedRequest]) -> list[JudgedRequest]:
    """Insert what is not yet stored; the answer is what was new, each span once."""
    unique = {_key(item): item for item in judged}
    if not unique:
        return []
    inserted = _INSERTERS[connection.dialect.name](connection, list(unique.values()))
    if inserted is None:
        return list(unique.values())
    return [item for key, item in unique.items() if key in inserted]


def _insert_sqlite(connection: Connection, judged: Sequence[JudgedRequest]) -> set[Key] | None:
    """The keys that were new, or None where all were."""
    newest = connection.execute(text("SELECT coalesce(max(id), 0) FROM requests")).scalar_one()
    result = connection.exec_driver_sql(SQLITE_INSERT, sqlite_rows(judged))
    if result.rowcount == len(judged):
        return None
    # The transaction holds the only right to write, so a higher number was given out just now.
    rows = connection.execute(
        text("SELECT trace_id, span_id FROM requests WHERE id > :newest"), {"newest": newest}
    )
    return {(trace_id, span_id) for trace_id, span_id in rows}


def _insert_postgres(connection: Connection, judged: Sequence[JudgedRequest]) -> set[Key] | None:
    # Writers that wait for each other's rows do so in one order, or they would wait for ever.
    ordered = sorted(judged, key=_key)
    rows = connection.exec_driver_sql(_POSTGRES_INSERT, tuple(postgres_columns(ordered)))
    return {(trace_id, span_id) for trace_id, span_id in rows}


_INSERTERS: Mapping[str, Callable[[Connection, Sequence[JudgedRequest]], set[Key] | None]] = {
    "sqlite": _insert_sqlite,
    "postgresql": _insert_postgres,
}
