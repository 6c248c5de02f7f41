"""A client's request on its way to an engine: the head as bytes, and the body."""

import asyncio
from collections.abc import Callable

from agent.sources.proxy.engine_connection import ConnectionPool, EngineConnection
from agent.sources.proxy.exchange import RawHeaders
from agent.sources.proxy.headers import HeaderLines, RequestHead
from agent.sources.proxy.relay_context import BodyMemory, ProxyLimits, Receive, Scope


class RequestBody:
    """The body of a request, read up to a limit.

    `unread` while there is more to read; `client_left` if the client left before.
    """

    __slots__ = (
        "_chunked",
        "_held_bytes",
        "_memory",
        "_receive",
        "client_left",
        "declared_bytes",
        "unread",
    )

    def __init__(self, receive: Receive, declared_bytes: int | None, memory: BodyMemory) -> None:
        self._receive = receive
        self._memory = memory
        self._held_bytes = 0
        self._chunked = False
        self.declared_bytes = declared_bytes
        self.unread = True
        self.client_left = False

    async def read(self, limits: ProxyLimits) -> bytes:
        """Read until the end, or what the limits and the memory for all bodies allow."""
        first = await self.read_piece()
        declared_bytes = max(self.declared_bytes or 0, len(first))
        if self.unread and not self.client_left and declared_bytes <= limits.measured_body_bytes:
            return await self._read_rest(first, limits)
        return first

    async def _read_rest(self, first: bytes, limits: ProxyLimits) -> bytes:
        pieces = [first]
        if not self._memory.has(self.declared_bytes or 0) or not self._hold(len(first)):
            return first
        try:
            async with asyncio.timeout(limits.body_s):
                while self.unread and self._held_bytes <= limits.measured_body_bytes:
                    pieces.append(await self.read_piece())
                    if self.client_left or not self._hold(len(pieces[-1])):
                        break
        except TimeoutError:
            # So slow a client must not keep the memory: the rest passes as it arrives.
            pass
        return b"".join(pieces)

    async def read_piece(self) -> bytes:
        """Read what has arrived."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_left = True
            return b""
        self.unread = message["more_body"]
        body: bytes = message["body"]
        return body

    def _hold(self, more_bytes: int) -> bool:
        held = self._memory.take(self._held_bytes, more_bytes)
        self._held_bytes += more_bytes * held
        return held

    def free(self) -> None:
        """Give the memory back: the bytes that were read went to the engine, or nowhere."""
        self._memory.give_back(self._held_bytes)
        self._held_bytes = 0

    def framing(self, size_bytes: int) -> HeaderLines:
        """Return the header line for the body's length, of which `size_bytes` were read."""
        length_bytes = self.declared_bytes if self.unread else size_bytes
        if length_bytes is None:
            self._chunked = True
            return [(b"transfer-encoding", b"chunked")]
        if length_bytes or self.declared_bytes is not None:
            return [(b"content-length", b"%d" % length_bytes)]
        return []

    def framed(self, data: bytes) -> bytes:
        """Return a piece of the body as sent over the wire, with the end mark after the last."""
        if not self._chunked:
            return data
        piece = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        return piece if self.unread else piece + b"0\r\n\r\n"

    async def relay(self, connection: EngineConnection, sent: Callable[[int], None] | None) -> None:
        """Relay the unread rest; returns when the client left or has its whole response."""
        while (message := await self._receive())["type"] == "http.request":
            self.unread = message["more_body"]
            connection.write(self.framed(message["body"]))
            if sent is not None:
                sent(len(message["body"]))
            await connection.drain()


def engine_head(
    scope: Scope,
    head: RequestHead,
    pool: ConnectionPool,
    replacements: RawHeaders,
    framing: HeaderLines,
) -> bytes:
    """Return the head of a request as the engine gets it."""
    client, query = scope["client"], scope["query_string"]
    pieces: list[bytes] = [
        scope["method"].encode(),
        b" ",
        pool.path,
        scope["raw_path"],
        b"?" + query if query else b"",
        b" HTTP/1.1\r\nhost: ",
        pool.authority,
        b"\r\n",
    ]
    for name, value in head.for_engine(replacements, client and client[0], scope["scheme"]):
        pieces += (name, b": ", value, b"\r\n")
    for name, value in framing:
        pieces += (name, b": ", value, b"\r\n")
    pieces.append(b"\r\n")
    return b"".join(pieces)
