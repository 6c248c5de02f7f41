"""The page of SQL tables: type, unit and meaning of every column."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sqlalchemy import Column, DateTime, LargeBinary, String, Table, Text, TypeDecorator

from agent.render.reference.field_meanings import field_meanings
from agent.render.reference.markdown_page import code, page, table

_HEADER = ("column", "type", "unit", "meaning")

# The meaning of a table itself is under this name.
TABLE = ""

# The unit of a column by the end of its name; the first that fits.
_UNITS = (
    (r"_bytes_per_s", "bytes/s"),
    (r"_flops_per_s", "FLOP/s"),
    (r"_s", "seconds"),
    (r"_usd", "US dollars"),
    (r"_bytes", "bytes"),
    (r"_flops", "FLOPs"),
    (r"_tokens", "tokens"),
    (r"_tokens_by_objective", "tokens"),
    (r"_m[fb]u", "ratio"),
    (r"_hours", "hours"),
    (r"joules", "joules"),
    (r"starts_at", "Unix seconds"),
)


def tables_page(tables: Iterable[Table], meanings: Mapping[str, Mapping[str, str]]) -> str:
    """The page in Markdown; `meanings` are those of columns by table, that of the table first."""
    return page(
        "Tables",
        "Every table and column of the database. Times are in UTC. A column marked `?` may be "
        "null: the value is unknown. PostgreSQL has the types of the same meaning.",
        _parts(tables, meanings),
    )


def _parts(tables: Iterable[Table], meanings: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for each in tables:
        own = meanings[each.name]
        yield f"## {code(each.name)}"
        yield own[TABLE]
        yield table(_HEADER, (_row(column, own) for column in each.columns))


def _row(column: Column[Any], own: Mapping[str, str]) -> tuple[str, ...]:
    return code(column.name), _type(column), unit_of(column), meaning_of(column, own)


def meaning_of(column: Column[Any], own: Mapping[str, str]) -> str:
    """The meaning of a column; one that holds a field of a record has the field's."""
    field = column.info.get("field")
    if column.name in own or field is None:
        return own[column.name]
    return field_meanings(field.record)[field.name]


def unit_of(column: Column[Any]) -> str:
    """The unit of a column's numbers; empty for counts, texts and timestamps."""
    if isinstance(column.type, (String, TypeDecorator)) and not column.name.endswith("objective"):
        return ""
    return next((unit for end, unit in _UNITS if re.search(f"{end}$", column.name)), "")


def _type(column: Column[Any]) -> str:
    kind = column.type
    if isinstance(kind, (TypeDecorator, DateTime)):
        text = "timestamp"
    elif isinstance(kind, LargeBinary):
        text = "bytes"
    elif isinstance(kind, Text):
        text = "text"
    elif isinstance(kind, String):
        text = f"text({kind.length})"
    else:
        text = str(kind).lower()
    return f"{text}?" if column.nullable else text
