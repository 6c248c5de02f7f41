"""Limits of time: on queries, and on a PostgreSQL that hangs and would hold a thread for long."""

import logging
import os
import socket
import threading
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.exc import DisconnectionError

from agent.errors import QueryTooSlow
from agent.store.connection import open_engine

_LOG = logging.getLogger(__name__)
_TIMER = "cut_off"

# A server that works ends a statement at its limit; one that hangs is cut off this much later.
CUT_OFF_LATER_S = 5.0
# The upkeep of old rows, and a migration, of large tables.
UPKEEP_S = 600.0
MIGRATION_S = 3600.0


def limit_waits(engine: Engine, cut_off_s: float) -> None:
    """Limit how long each use of a connection may take, of PostgreSQL alone.

    A connection that is used for longer than `cut_off_s` is cut off, whatever the server does. The
    engine must be opened with `pool_pre_ping=False`, which would ask a server that hangs before
    that time begins.
    """
    if engine.dialect.name != "postgresql":
        return
    cut_off_after(engine, cut_off_s)
    event.listen(engine, "checkout", partial(_ping, engine))


def _ping(engine: Engine, connection: Any, _record: object, _fairy: object) -> None:
    """Let the pool connect anew where a connection was lost since its last use."""
    driver: Any = engine.dialect.dbapi
    try:
        engine.dialect.do_ping(connection)
    except driver.Error as error:
        raise DisconnectionError(str(error)) from error


def cut_off_after(engine: Engine, limit_s: float) -> None:
    """Cut off each connection that is out of the pool for longer than `limit_s`.

    The thread that waits for the connection gets the driver's error. A frozen server keeps its
    connections open, and its kernel acknowledges what is sent, so no time-out of the driver or of
    TCP ends the wait.
    """
    event.listen(engine, "checkout", partial(_start_timer, limit_s=limit_s))
    event.listen(engine, "checkin", _stop_timer)


def _start_timer(connection: Any, record: Any, _fairy: object, *, limit_s: float) -> None:
    timer = threading.Timer(limit_s, _cut, (connection, limit_s))
    timer.daemon = True
    record.info[_TIMER] = timer
    timer.start()


def _stop_timer(_connection: object, record: Any) -> None:
    timer = record.info.pop(_TIMER, None)
    if timer is not None:
        timer.cancel()


def _cut(connection: Any, limit_s: float) -> None:
    if connection.closed:
        return
    _LOG.warning("the shared database did not answer within %g s: the connection is cut", limit_s)
    # A second descriptor of the socket: closing it leaves the driver's own descriptor open.
    with suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)


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
