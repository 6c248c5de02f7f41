"""Connections of the API's queries: their own, each transaction with a limit of time."""

from functools import partial
from time import monotonic
from typing import Any

from sqlalchemy import Engine, event

from agent.errors import QueryTooSlow
from agent.store.connection import open_engine
from agent.store.time_limits import CUT_OFF_LATER_S, limit_waits

# SQLite looks at the clock after this many steps of its machine, which take less than 1 ms.
_STEPS_PER_LOOK = 10_000

_DEADLINE = "query_deadline"


def open_query_engine(url: str, limit_s: float, **pool: Any) -> Engine:
    """An engine for queries. Raises SettingsInvalid.

    It has connections of its own, so that slow queries take none from those who write. One of
    PostgreSQL that does not answer is cut off.
    """
    limits = {"pool_timeout": limit_s, "pool_pre_ping": False}
    engine = open_engine(url, statement_s=limit_s, **limits, **pool)
    limit_waits(engine, limit_s + CUT_OFF_LATER_S)
    event.listen(engine, "begin", partial(_begin, limit_s=limit_s))
    event.listen(engine, "before_cursor_execute", refuse_when_late)
    for end in ("commit", "rollback"):
        event.listen(engine, end, _end)
    return engine


def _begin(connection: Any, *, limit_s: float) -> None:
    deadline = connection.info[_DEADLINE] = monotonic() + limit_s
    begun = _BEGUN.get(connection.dialect.name)
    if begun is not None:
        begun(connection, deadline, max(round(limit_s * 1000), 1))


def _begin_postgres(connection: Any, _deadline: float, limit_ms: int) -> None:
    connection.exec_driver_sql(f"SET LOCAL statement_timeout = {limit_ms}")


def _begin_sqlite(connection: Any, deadline: float, limit_ms: int) -> None:
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {limit_ms}").close()
    driver = connection.connection.driver_connection
    driver.set_progress_handler(lambda: monotonic() > deadline, _STEPS_PER_LOOK)


# A connection to ClickHouse has its limit from its engine.
_BEGUN = {"postgresql": _begin_postgres, "sqlite": _begin_sqlite}


def _end(connection: Any) -> None:
    connection.info.pop(_DEADLINE, None)


def refuse_when_late(connection: Any, *_: Any) -> None:
    """Raise QueryTooSlow after the deadline: each statement has a limit of its own.

    Whoever works between the rows of a statement calls it, too.
    """
    if monotonic() > connection.info.get(_DEADLINE, float("inf")):
        raise QueryTooSlow
