"""A condition on the JSON object of verdicts by objective, for both kinds of database."""

from typing import Any

from sqlalchemy import ColumnElement, exists
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class _JsonPairs(FunctionElement[Any]):
    """The keys and values of a JSON object as rows."""

    inherit_cache = True


@compiles(_JsonPairs, "sqlite")
def _sqlite_pairs(element: _JsonPairs, compiler: Any, **given: Any) -> str:
    return f"json_each({compiler.process(element.clauses, **given)})"


@compiles(_JsonPairs, "postgresql")
def _postgres_pairs(element: _JsonPairs, compiler: Any, **given: Any) -> str:
    return f"json_each_text(CAST({compiler.process(element.clauses, **given)} AS json))"


def has_verdict(
    verdicts: ColumnElement[str], objective: str, verdict: str | None = None
) -> ColumnElement[bool]:
    """Whether this objective gave this verdict, or any verdict where None is given."""
    pairs = _JsonPairs(verdicts).table_valued("key", "value")
    found = exists().select_from(pairs).where(pairs.c.key == objective)
    return found if verdict is None else found.where(pairs.c.value == verdict)
