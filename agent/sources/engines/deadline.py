"""A limit on a whole HTTP exchange, also on one whose bytes drip in one by one.

`requests`, urllib3 and httpx limit only each wait for bytes. aiohttp has a total timeout, but it
needs an event loop in each polling thread.
"""

import socket
import threading
from contextlib import suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from agent.http_client import TrustingAdapter

_CURRENT: ContextVar["Deadline | None"] = ContextVar("deadline", default=None)


class Deadline:
    """Inside `with`, a timer shuts the connections that a DeadlineAdapter opened.

    The connections end with the block: a kept one would have no deadline, and an engine may close
    it just when it is used again.
    """

    def __init__(self, timeout_s: float) -> None:
        self.passed = False
        self._connections: list[tuple[HTTPConnection, socket.socket]] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(timeout_s, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        self._token = _CURRENT.set(self)
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        _CURRENT.reset(self._token)
        for connection, _ in self._connections:
            connection.close()

    def add(self, connection: HTTPConnection) -> None:
        """Shut this open connection too when the time is over, or now if it is over."""
        with self._lock:
            # A connection drops its socket as soon as the response's headers are read.
            self._connections.append((connection, connection.sock))
            if self.passed:
                _shut(connection.sock)

    def _end(self) -> None:
        with self._lock:
            self.passed = True
            for _, opened in self._connections:
                _shut(opened)


def _shut(opened: socket.socket) -> None:
    # A thread that waits for data does not notice close(). The TLS socket's shutdown would wait for
    # the other side.
    with suppress(OSError):
        socket.socket.shutdown(opened, socket.SHUT_RDWR)


class _LimitedHTTP(HTTPConnection):
    def connect(self) -> None:
        super().connect()
        _add(self)


class _LimitedHTTPS(HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        _add(self)


def _add(connection: HTTPConnection) -> None:
    if deadline := _CURRENT.get():
        deadline.add(connection)


class _LimitedHTTPPool(HTTPConnectionPool):
    ConnectionCls = _LimitedHTTP


class _LimitedHTTPSPool(HTTPSConnectionPool):
    ConnectionCls = _LimitedHTTPS


class DeadlineAdapter(TrustingAdapter):
    """Opens connections that a Deadline can shut."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Make the pools of `requests`, with connections of this module."""
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {
            "http": _LimitedHTTPPool,
            "https": _LimitedHTTPSPool,
        }
