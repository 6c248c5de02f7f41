"""A client's request on its way to an engine."""

from collections.abc import Callable

from agent.sources.proxy.connection import EngineConnection
from agent.sources.proxy.exchange import RawHeaders
from agent.sources.proxy.headers import HeaderLines, RequestHead
from agent.sources.proxy.parts import Receive, Scope
from agent.sources.proxy.pool import EnginePool


class RequestBody:
    """The body of a request, read as far as it is wanted; `left` while there is more to read."""

    __slots__ = ("_chunked", "_receive", "declared_bytes", "left")

    def __init__(self, receive: Receive, declared_bytes: int | None) -> None:
        self._receive = receive
        self._chunked = False
        self.declared_bytes = declared_bytes
        self.left = True

    async def take(self, limit_bytes: int) -> bytes | None:
        """What comes until the end or until a limit is passed; None where the client left."""
        pieces, size_bytes = [], 0
        while self.left and size_bytes <= limit_bytes:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return None
            pieces.append(message["body"])
            size_bytes += len(message["body"])
            self.left = message["more_body"]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def frame(self, size_bytes: int) -> HeaderLines:
        """The header line that tells the engine where the body ends; `size_bytes` are there."""
        length_bytes = self.declared_bytes if self.left else size_bytes
        if length_bytes is None:
            self._chunked = True
            return [(b"transfer-encoding", b"chunked")]
        if length_bytes or self.declared_bytes is not None:
            return [(b"content-length", b"%d" % length_bytes)]
        return []

    def framed(self, data: bytes) -> bytes:
        """A piece of the body as it goes over the wire, and what ends the body after the last."""
        if not self._chunked:
            return data
        piece = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        return piece if self.left else piece + b"0\r\n\r\n"

    async def relay(self, connection: EngineConnection, sent: Callable[[int], None] | None) -> None:
        """Relay what is left; comes back when the client has left, or has its whole answer."""
        while (message := await self._receive())["type"] == "http.request":
            self.left = message["more_body"]
            connection.write(self.framed(message["body"]))
            if sent is not None:
                sent(len(message["body"]))
            await connection.drain()


def engine_head(
    scope: Scope, head: RequestHead, pool: EnginePool, put: RawHeaders, frame: HeaderLines
) -> bytes:
    """The head of a request as its engine gets it."""
    client, query = scope["client"], scope["query_string"]
    parts: list[bytes] = [
        scope["method"].encode(),
        b" ",
        pool.path,
        scope["raw_path"],
        b"?" + query if query else b"",
        b" HTTP/1.1\r\nhost: ",
        pool.authority,
        b"\r\n",
    ]
    for name, value in head.for_engine(put, client and client[0], scope["scheme"]):
        parts += (name, b": ", value, b"\r\n")
    for name, value in frame:
        parts += (name, b": ", value, b"\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)
