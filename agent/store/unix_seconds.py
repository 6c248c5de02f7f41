"""A timestamp as Unix seconds by the database itself, for each kind: a million are slow here."""

from typing import Any

from sqlalchemy import Float
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
