"""Cuts off a connection that is in use for too long: a frozen server answers no time-out."""

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
    """From now on, cut each connection off that is taken from the pool for longer than this.

    Whoever waits for it gets the driver's error. A stopped server keeps its connections open, and
    its kernel acknowledges what is sent, so that no time-out of the driver or of TCP works.
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
    with suppress(Exception), socket.socket(fileno=_copy_of(connection)) as own:
        own.shutdown(socket.SHUT_RDWR)


def _copy_of(connection: Any) -> int:
    """A descriptor of the same socket, which may be closed without closing the driver's."""
    return os.dup(connection.fileno())
