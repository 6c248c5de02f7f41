"""SQL that each kind of database has in its own words: Unix seconds, verdicts by objective."""

import json
from typing import Any

from sqlalchemy import ColumnElement, Float, Integer, String, literal
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class UnixSeconds(FunctionElement[float]):
    """Unix seconds of a timestamp column, to the millisecond."""

    type = Float()
    inherit_cache = True


@compiles(UnixSeconds, "sqlite")
def _sqlite_seconds(element: UnixSeconds, compiler: Any, **given: Any) -> str:
    # The Julian day of 1970-01-01.
    return f"(julianday({compiler.process(element.clauses, **given)}) - 2440587.5) * 86400.0"


@compiles(UnixSeconds, "postgresql")
def _postgres_seconds(element: UnixSeconds, compiler: Any, **given: Any) -> str:
    seconds = f"EXTRACT(EPOCH FROM {compiler.process(element.clauses, **given)})"
    return f"CAST({seconds} AS double precision)"


@compiles(UnixSeconds, "clickhousedb")
def _clickhouse_seconds(element: UnixSeconds, compiler: Any, **given: Any) -> str:
    at = compiler.process(element.clauses, **given)
    return f"toUnixTimestamp64Micro(toDateTime64({at}, 6, 'UTC')) / 1e6"


class _PlaceOf(FunctionElement[int]):
    """The place of the second text in the first one; 0 without it."""

    type = Integer()
    inherit_cache = True


_FUNCTIONS = {"sqlite": "instr", "postgresql": "strpos", "clickhousedb": "position"}


def _compiled(element: _PlaceOf, compiler: Any, **given: Any) -> str:
    function = _FUNCTIONS[compiler.dialect.name]
    return f"{function}({compiler.process(element.clauses, **given)})"


for _dialect in _FUNCTIONS:
    compiles(_PlaceOf, _dialect)(_compiled)


def has_verdict(
    verdicts: ColumnElement[str], objective: str, verdict: str | None = None
) -> ColumnElement[bool]:
    """Whether this objective gave this verdict, or any verdict where None is given.

    By the text, as `verdicts_text` writes it: a database refuses a whole query where it cannot
    parse the JSON of a single row.
    """
    pair = f"{json.dumps(objective)}: " + ("" if verdict is None else json.dumps(str(verdict)))
    return _PlaceOf(verdicts, literal(pair, String())) > 0
