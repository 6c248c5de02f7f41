"""The connections to one engine."""

import asyncio
from collections import deque
from collections.abc import Callable
from urllib.parse import urlsplit

from agent.sources.proxy.connection import EngineConnection

# uvicorn, which vLLM and SGLang serve with, hangs up after 5 idle seconds; a request that meets
# this hanging up is lost, so the proxy must be first.
_IDLE_S = 4.0


class EnginePool:
    """Opens connections to an engine and keeps those that may carry another request."""

    def __init__(self, url: str, monotonic: Callable[[], float], connect_s: float) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._monotonic = monotonic
        self._connect_s = connect_s
        # The one that was used last is taken first, so that the others grow old and go.
        self._idle: deque[EngineConnection] = deque()
        self.authority = parts.netloc.rpartition("@")[2].encode()
        self.origin = f"{parts.scheme}://".encode() + self.authority
        self.path = parts.path.rstrip("/").encode()

    @property
    def idle(self) -> int:
        """How many connections wait for a request."""
        return len(self._idle)

    def take(self) -> EngineConnection | None:
        """A connection that is open already, None where there is none."""
        oldest_s = self._monotonic() - _IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and connection.idle_since_s >= oldest_s:
                return connection
            connection.abort()
        return None

    async def connect(self) -> EngineConnection:
        """A new connection. OSError where there is none to be had, TimeoutError among them."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_s):
            _, connection = await loop.create_connection(
                lambda: EngineConnection(loop, self._monotonic),
                self._host,
                self._port,
                ssl=self._tls or None,
            )
        return connection

    def give_back(self, connection: EngineConnection) -> None:
        """Keep a connection whose exchange is over, or close it where it can carry no other."""
        if not connection.reusable:
            connection.abort()
            return
        connection.idle_since_s = self._monotonic()
        self._idle.append(connection)
        while self._idle[0].idle_since_s < connection.idle_since_s - _IDLE_S:
            self._idle.popleft().abort()

    def close(self) -> None:
        """Close what is idle."""
        while self._idle:
            self._idle.pop().abort()
