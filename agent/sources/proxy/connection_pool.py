"""The pool of connections to one engine."""

import asyncio
from collections import deque
from collections.abc import Callable
from ssl import SSLContext
from urllib.parse import urlsplit

from agent.sources.proxy.engine_connection import EngineConnection

# uvicorn, which vLLM and SGLang serve with, hangs up after 5 idle seconds; a request that meets
# this hanging up is lost, so the proxy must be first.
_IDLE_S = 4.0


class ConnectionPool:
    """Opens connections to an engine and keeps idle ones for the next request."""

    def __init__(
        self,
        url: str,
        monotonic: Callable[[], float],
        connect_s: float,
        tls: SSLContext | None = None,
    ) -> None:
        """`tls` replaces the default context for an https URL."""
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = (tls or True) if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._monotonic = monotonic
        self._connect_s = connect_s
        # The connection used last is taken first, so that the others reach the idle limit.
        self._idle: deque[EngineConnection] = deque()
        self.authority = parts.netloc.rpartition("@")[2].encode()
        self.origin = f"{parts.scheme}://".encode() + self.authority
        self.path = parts.path.rstrip("/").encode()

    def take(self) -> EngineConnection | None:
        """Return an open connection, None if there is none."""
        oldest_s = self._monotonic() - _IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and connection.idle_since_s >= oldest_s:
                return connection
            connection.abort()
        return None

    async def connect(self) -> EngineConnection:
        """Open a new connection. Raises OSError, or TimeoutError after the connect time-out."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_s):
            _, connection = await loop.create_connection(
                lambda: EngineConnection(loop, self._monotonic),
                self._host,
                self._port,
                ssl=self._tls,
            )
        return connection

    def give_back(self, connection: EngineConnection) -> None:
        """Keep a connection whose exchange is over; close it if it cannot be reused."""
        if not connection.reusable:
            connection.abort()
            return
        connection.idle_since_s = self._monotonic()
        self._idle.append(connection)
        while self._idle[0].idle_since_s < connection.idle_since_s - _IDLE_S:
            self._idle.popleft().abort()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().abort()
