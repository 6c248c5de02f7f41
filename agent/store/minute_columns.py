"""The columns of a booked minute, derived from the declaration of its fields."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sqlalchemy import Column

from agent.records.minute import Addable, Cost, EngineWork, Ledger, MinuteRow
from agent.records.record_fields import RecordField, fields_of
from agent.store.request_columns import column_of

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
