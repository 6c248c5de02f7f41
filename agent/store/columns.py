"""The columns of requests and of minutes, derived from the declarations of their fields."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Boolean, Column, Float, Integer, String, Text
from sqlalchemy.types import TypeEngine

from agent.records.minute import Addable, Cost, EngineWork, Ledger, MinuteRow
from agent.records.record_fields import Mark, RecordField, fields_of
from agent.records.request import EngineView, ProxyView, RequestRecord
from agent.store.utc_timestamp import UtcTimestamp

_TYPES: dict[type, type[TypeEngine[Any]]] = {int: BigInteger, float: Float, bool: Boolean}
_WORD_CHARACTERS = 10

RECORD_FIELDS = tuple(field for field in fields_of(RequestRecord) if not field.is_view)
PROXY_FIELDS = fields_of(ProxyView)
ENGINE_FIELDS = fields_of(EngineView)

_OWN = frozenset(RequestRecord._fields)


def engine_column(field: str) -> str:
    """The column of a field of the engine's view; the record's field has the plain name."""
    return f"engine_{field}" if field in _OWN else field


def record_columns() -> list[Column[Any]]:
    """New columns for all fields of a record and of its views."""
    return [
        *(column_of(field.name, field) for field in (*RECORD_FIELDS, *PROXY_FIELDS)),
        *(column_of(engine_column(field.name), field) for field in ENGINE_FIELDS),
    ]


def column_of(name: str, field: RecordField, *, nullable: bool = False) -> Column[Any]:
    """A new column for a field; `nullable` where its whole part may be unknown."""
    nullable = nullable or field.nullable
    # The reference of tables finds the field's meaning by it.
    info = {"field": field}
    return Column(name, _type(field), nullable=nullable, info=info)


def _type(field: RecordField) -> TypeEngine[Any] | type[TypeEngine[Any]]:
    if field.is_timestamp:
        return UtcTimestamp()
    if field.is_json:
        return Text()
    if field.is_enum:
        return String(_WORD_CHARACTERS)
    if field.type is str:
        return String(field.length)
    return Integer() if Mark.SMALL in field.marks else _TYPES[field.type]()


# The parts of a minute that add up, and the columns of their fields.
_PARTS: Mapping[str, tuple[type[Addable], str]] = {
    "work": (EngineWork, "{}"),
    "cost": (Cost, "{}_usd"),
    "ledger": (Ledger, "ledger_{}"),
}


class _Stored(NamedTuple):
    """A field of a minute, or of one of its parts, and its column."""

    column: str
    field: RecordField
    part: str | None
    nullable: bool


def _stored() -> Iterator[_Stored]:
    for field in fields_of(MinuteRow):
        if field.name in _PARTS:
            part, column = _PARTS[field.name]
            for inner in fields_of(part):
                yield _Stored(column.format(inner.name), inner, field.name, field.nullable)
        else:
            yield _Stored(field.name, field, None, field.nullable)


_STORED = tuple(_stored())


def minute_columns() -> Iterator[Column[Any]]:
    """New columns for all fields of a minute and of its parts."""
    for column, field, _, nullable in _STORED:
        yield column_of(column, field, nullable=nullable)


def minute_values(minute: MinuteRow) -> dict[str, Any]:
    """The values of a minute by column; JSON where a value is a mapping or a list."""
    values: dict[str, Any] = {}
    for column, field, part, _ in _STORED:
        whole = minute if part is None else getattr(minute, part)
        value = None if whole is None else getattr(whole, field.name)
        values[column] = json.dumps(value) if field.is_json and value is not None else value
    return values


def minute_from(row: Mapping[str, Any]) -> MinuteRow:
    """The minute of a row. A part without any known value is unknown."""
    values: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {name: {} for name in _PARTS}
    for column, field, part, _ in _STORED:
        value = row[column]
        known = json.loads(value) if field.is_json and value is not None else value
        (values if part is None else parts[part])[field.name] = known
    for name, known in parts.items():
        unknown = all(value is None for value in known.values())
        values[name] = None if unknown else _PARTS[name][0](**known)
    return MinuteRow(**values | {"disagreements": tuple(values["disagreements"])})
