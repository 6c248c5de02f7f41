"""A client's request on its way to an engine: the head as bytes, and the body."""

from collections.abc import Callable

from agent.sources.proxy.connection_pool import ConnectionPool
from agent.sources.proxy.engine_connection import EngineConnection
from agent.sources.proxy.exchange import RawHeaders
from agent.sources.proxy.headers import HeaderLines, RequestHead
from agent.sources.proxy.relay_context import Receive, Scope


class RequestBody:
    """The body of a request, read up to a limit; `unread` while there is more to read."""

    __slots__ = ("_chunked", "_receive", "declared_bytes", "unread")

    def __init__(self, receive: Receive, declared_bytes: int | None) -> None:
        self._receive = receive
        self._chunked = False
        self.declared_bytes = declared_bytes
        self.unread = True

    async def read(self, limit_bytes: int) -> bytes | None:
        """Read until the end or until more than a limit is there; None if the client left."""
        pieces, size_bytes = [], 0
        while self.unread and size_bytes <= limit_bytes:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return None
            pieces.append(message["body"])
            size_bytes += len(message["body"])
            self.unread = message["more_body"]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

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
