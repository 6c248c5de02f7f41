"""A condition on the JSON object of verdicts by objective, for each kind of database."""

import json
from typing import Any

from sqlalchemy import ColumnElement, Integer, String, literal
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


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
