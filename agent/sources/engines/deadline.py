"""A limit on a whole HTTP exchange: `requests` itself only limits the wait for each piece."""

import socket
import threading
from contextlib import suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self

from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

_CURRENT: ContextVar["Deadline | None"] = ContextVar("deadline", default=None)


class Deadline:
    """Inside `with`, the connections opened by a DeadlineAdapter are cut when time is up.

    They do not outlive the block: one that is kept for the next exchange would belong to no
    deadline, and an engine may drop it just when it is used again.
    """

    def __init__(self, timeout_s: float) -> None:
        self.passed = False
        self._connections: list[tuple[HTTPConnection, socket.socket]] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(timeout_s, self._cut)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._token = _CURRENT.set(self)
        self._timer.start()
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

    def watch(self, connection: HTTPConnection) -> None:
        """Cut this open connection too when time is up, or now if it is."""
        with self._lock:
            # A connection lets go of its socket as soon as the answer's headers are read.
            self._connections.append((connection, connection.sock))
            if self.passed:
                _shut(connection.sock)

    def _cut(self) -> None:
        with self._lock:
            self.passed = True
            for _, opened in self._connections:
                _shut(opened)


def _shut(opened: socket.socket) -> None:
    # Not close(), which a thread that waits for data would not notice; and past TLS, which would
    # wait for the other side.
    with suppress(OSError):
        socket.socket.shutdown(opened, socket.SHUT_RDWR)


class _WatchedHTTP(HTTPConnection):
    def connect(self) -> None:
        super().connect()
        _watch(self)


class _WatchedHTTPS(HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        _watch(self)


def _watch(connection: HTTPConnection) -> None:
    if deadline := _CURRENT.get():
        deadline.watch(connection)


class _WatchedHTTPPool(HTTPConnectionPool):
    ConnectionCls = _WatchedHTTP


class _WatchedHTTPSPool(HTTPSConnectionPool):
    ConnectionCls = _WatchedHTTPS


class DeadlineAdapter(HTTPAdapter):
    """Opens connections that a Deadline can cut."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """The pools of `requests`, with our connections in them."""
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {
            "http": _WatchedHTTPPool,
            "https": _WatchedHTTPSPool,
        }
