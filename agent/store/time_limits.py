"""Limits of time on PostgreSQL: a server that hangs holds no thread of the agent for long."""

import logging
import os
import socket
import threading
from contextlib import suppress
from functools import partial
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.exc import DisconnectionError

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
    event.listen(engine, "checkout", partial(_begin, limit_s=limit_s))
    event.listen(engine, "checkin", _end)


def _begin(connection: Any, record: Any, _fairy: object, *, limit_s: float) -> None:
    timer = threading.Timer(limit_s, _cut, (connection, limit_s))
    timer.daemon = True
    record.info[_TIMER] = timer
    timer.start()


def _end(_connection: object, record: Any) -> None:
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
