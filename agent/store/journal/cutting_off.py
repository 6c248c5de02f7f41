"""Cuts off a connection that is in use for too long: no time-out works on a frozen server."""

import logging
import os
import socket
import threading
from contextlib import suppress
from functools import partial
from typing import Any

from sqlalchemy import Engine, event

_LOG = logging.getLogger(__name__)
_TIMER = "cut_off"


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
