"""The columns of `requests` that hold a record, derived from the declaration of its fields."""

from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Float, Integer, String, Text
from sqlalchemy.types import TypeEngine

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
