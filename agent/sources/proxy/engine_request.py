"""A client's request on its way to an engine: as it is parsed, its buffered body, its head."""

from collections.abc import Sequence
from urllib.parse import unquote

import httptools

from agent.sources.proxy.engine_connection import ConnectionPool
from agent.sources.proxy.exchange import RawHeaders
from agent.sources.proxy.relay_context import BodyMemory, ProxyLimits


class ClientRequest:
    """A request as it is read from its client.

    `body` is what came of the body and nobody took; `whole` is true once the body has ended.
    `keeps_alive` is false if the connection must be closed after the response.
    """

    __slots__ = (
        "_dropped",
        "body",
        "headers",
        "keeps_alive",
        "method",
        "path",
        "target",
        "whole",
    )

    def __init__(
        self, method: bytes, url: bytes, headers: RawHeaders, *, keeps_alive: bool
    ) -> None:
        """Raises an exception for a URL that is none."""
        parts = httptools.parse_url(url)
        path = parts.path.decode("ascii")
        self.method = method.decode("ascii")
        self.path = unquote(path) if "%" in path else path
        self.target: bytes = parts.path + b"?" + parts.query if parts.query else parts.path
        self.headers = headers
        self.keeps_alive = keeps_alive
        self.body = bytearray()
        self.whole = False
        self._dropped = False

    def add_body(self, data: bytes) -> None:
        """Add a part of the body."""
        if not self._dropped:
            self.body += data

    def take_body(self) -> bytes:
        """Return what came of the body since the last call."""
        data = bytes(self.body)
        self.body.clear()
        return data

    def drop_body(self) -> None:
        """Forget the body and what comes of it: the request has its response."""
        self._dropped = True
        self.body.clear()


class BodyBuffer:
    """Decides how long a body is buffered, and counts its memory."""

    __slots__ = ("_held_bytes", "_limits", "_memory")

    def __init__(self, limits: ProxyLimits, memory: BodyMemory) -> None:
        self._limits = limits
        self._memory = memory
        self._held_bytes = 0

    def waits_for_more(self, size_bytes: int, declared_bytes: int | None) -> bool:
        """Whether the rest of a body is waited for, of which `size_bytes` came.

        `declared_bytes` is its length, None if the client declares none.
        """
        limit_bytes = self._limits.measured_body_bytes
        if not self._held_bytes:
            if max(declared_bytes or 0, size_bytes) > limit_bytes:
                return False
            if not self._memory.has(declared_bytes or 0):
                return False
        more_bytes = size_bytes - self._held_bytes
        if not self._memory.take(self._held_bytes, more_bytes):
            return False
        self._held_bytes = size_bytes
        return size_bytes <= limit_bytes

    def free(self) -> None:
        """Give the memory back: the bytes that were read went to the engine, or nowhere."""
        self._memory.give_back(self._held_bytes)
        self._held_bytes = 0


class BodyFraming:
    """How a body is framed on its way to the engine."""

    __slots__ = ("_chunked", "line")

    def __init__(self, size_bytes: int, declared_bytes: int | None, *, whole: bool) -> None:
        """`size_bytes` are there to be sent, all of the body if it is `whole`."""
        length_bytes = size_bytes if whole else declared_bytes
        self._chunked = length_bytes is None
        # The header line.
        self.line = b""
        if length_bytes is None:
            self.line = b"transfer-encoding: chunked\r\n"
        elif length_bytes or declared_bytes is not None:
            self.line = b"content-length: %d\r\n" % length_bytes

    def framed(self, data: bytes, *, last: bool) -> bytes:
        """Return a piece of the body as sent over the wire, with the end mark after the last."""
        if not self._chunked:
            return data
        piece = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        return piece + b"0\r\n\r\n" if last else piece


def engine_head(
    request: ClientRequest, lines: Sequence[bytes], pool: ConnectionPool, framing: BodyFraming
) -> Sequence[bytes]:
    """Return the head of a request as the engine gets it, in parts."""
    return (
        request.method.encode(),
        b" ",
        pool.path,
        request.target,
        b" HTTP/1.1\r\nhost: ",
        pool.authority,
        b"\r\n",
        *lines,
        framing.line,
        b"\r\n",
    )
