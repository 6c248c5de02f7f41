"""A condition on the JSON object of verdicts by objective, for each kind of database."""

from typing import Any

from sqlalchemy import Boolean, ColumnElement, String, literal
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class _HasVerdict(FunctionElement[bool]):
    """Whether a JSON object has a key, and its value is the second one where that is given."""

    type = Boolean()
    inherit_cache = True


def _in_pairs(element: _HasVerdict, compiler: Any, pairs: str, given: Any) -> str:
    verdicts, *wanted = (compiler.process(each, **given) for each in element.clauses)
    conditions = " AND ".join(
        f"pairs.{name} = {value}" for name, value in zip(("key", "value"), wanted, strict=False)
    )
    return f"(EXISTS (SELECT 1 FROM {pairs.format(verdicts)} AS pairs WHERE {conditions}))"


@compiles(_HasVerdict, "sqlite")
def _in_sqlite(element: _HasVerdict, compiler: Any, **given: Any) -> str:
    return _in_pairs(element, compiler, "json_each({})", given)


@compiles(_HasVerdict, "postgresql")
def _in_postgres(element: _HasVerdict, compiler: Any, **given: Any) -> str:
    return _in_pairs(element, compiler, "json_each_text(CAST({} AS json))", given)


@compiles(_HasVerdict, "clickhousedb")
def _in_clickhouse(element: _HasVerdict, compiler: Any, **given: Any) -> str:
    verdicts, name, *wanted = (compiler.process(each, **given) for each in element.clauses)
    if not wanted:
        return f"JSONHas({verdicts}, {name})"
    return f"(JSONExtractString({verdicts}, {name}) = {wanted[0]})"


def has_verdict(
    verdicts: ColumnElement[str], objective: str, verdict: str | None = None
) -> ColumnElement[bool]:
    """Whether this objective gave this verdict, or any verdict where None is given."""
    wanted = [objective] if verdict is None else [objective, str(verdict)]
    return _HasVerdict(verdicts, *(literal(each, String()) for each in wanted))
