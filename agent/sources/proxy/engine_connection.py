"""HTTP/1.1 connections to an engine, and the pool that keeps idle ones.

aiohttp's client is not used here because its session adds more to the time to the first token than
a whole router in Rust does (`benchmarks/proxy.py`). The parser is the same llhttp.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from ssl import SSLContext
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from agent.sources.proxy.headers import HeaderLines

# Limit of a head, and of the lines between two pieces of a body.
_MAX_HEAD_BYTES = 256 * 1024


class ResponseHandler(Protocol):
    """Takes the response on a connection, in the moment in which its bytes arrive.

    `take_head` comes once, with `alone` if no part of the body was read with the head. Then come
    pieces; `ended` marks the last one, which may be empty. Or `lose` comes instead of any of them,
    with a sentence about why there is no response, or why it broke off.
    """

    def take_head(self, *, alone: bool) -> None:
        """Take the status and headers of the connection."""

    def take_piece(self, data: bytes, at_s: float, *, ended: bool) -> None:
        """Take bytes of the body that were read at this time."""

    def lose(self, failure: str) -> None:
        """Take the news that no more of the response comes."""

    def engine_takes(self, *, more: bool) -> None:
        """Take the news of whether the engine reads what is written."""

    def fault(self) -> None:
        """End the exchange after an exception of one of these calls."""


class EngineConnection(asyncio.Protocol):
    """Carries one request and its response at a time.

    `status` is None until the head of the response arrived. `read_at_s` is the time of the last
    read. `writing_paused` is true while the engine reads slower than its client sends.
    """

    __slots__ = (
        "_bodyless",
        "_ended",
        "_ends_with_connection",
        "_failure",
        "_handler",
        "_head_bytes",
        "_keeps_alive",
        "_monotonic",
        "_parser",
        "_pieces",
        "_reading_paused",
        "_transport",
        "head_at_s",
        "headers",
        "idle_since_s",
        "read_at_s",
        "status",
        "writing_paused",
    )

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._handler: ResponseHandler | None = None
        self.idle_since_s = 0.0
        self.writing_paused = self._reading_paused = False
        self._reset(bodyless=False)

    def _reset(self, *, bodyless: bool) -> None:
        self.status: int | None = None
        self.headers: HeaderLines = []
        self.head_at_s = 0.0
        self.read_at_s = 0.0
        self._bodyless = bodyless
        self._ends_with_connection = False
        self._keeps_alive = False
        self._ended = False
        self._failure: str | None = None
        self._pieces: list[bytes] = []
        self._head_bytes = 0

    # The exchange

    def send_request(self, handler: ResponseHandler, data: bytes, *, bodyless: bool) -> None:
        """Write a request, or its beginning; `bodyless` if the response has no body: HEAD."""
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
            # aiohttp's client accepts the same two deviations.
            self._parser.set_dangerous_leniencies(
                lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
            )
        self._reset(bodyless=bodyless)
        self._handler = handler
        if self._transport is None:
            # The engine closed it before this call.
            asyncio.get_running_loop().call_soon(self.connection_lost, None)
        self.write(data)

    def write(self, data: bytes) -> None:
        """Write more of a request's body; does nothing after the engine closed the connection."""
        if self._transport is not None:
            self._transport.write(data)

    def pause_reading(self, paused: bool) -> None:
        """Read nothing from the engine, or go on."""
        transport = self._transport
        if transport is None or paused is self._reading_paused or transport.is_closing():
            return
        self._reading_paused = paused
        if paused:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def release(self) -> None:
        """Forget the handler: its exchange is over."""
        self._handler = None
        self.pause_reading(False)

    def abort(self) -> None:
        """Close at once, so that the engine stops working on the request."""
        self._handler = None
        if self._transport is not None:
            self._transport.abort()

    @property
    def reusable(self) -> bool:
        """Whether the response has ended and the connection can carry another request."""
        return (
            self._ended
            and self._keeps_alive
            and not self.writing_paused
            and self._transport is not None
            and not self._transport.is_closing()
        )

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport of the new connection."""
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse bytes of a response, and hand them on."""
        handler = self._handler
        if handler is None or self._parser is None:
            # It sent data that belongs to no request.
            self.abort()
            return
        self.read_at_s = self._monotonic()
        self._head_bytes += len(data)
        headless = self.status is None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._not_http("it switched to another protocol")
        except httptools.HttpParserError as error:
            self._not_http(error)
        if self._head_bytes > _MAX_HEAD_BYTES and not (self._pieces or self._ended):
            self._fail(f"the head of its response exceeds {_MAX_HEAD_BYTES} bytes")
        try:
            self._hand_on(handler, headless)
        except Exception:
            handler.fault()

    def _hand_on(self, handler: ResponseHandler, headless: bool) -> None:
        """Hand on what was read. The handler may end its exchange at each step."""
        if headless and self.status is not None:
            handler.take_head(alone=not (self._pieces or self._ended))
            if self._handler is not handler:
                return
        if self._pieces or (self._ended and self._failure is None):
            pieces, self._pieces = self._pieces, []
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            handler.take_piece(piece, self.read_at_s, ended=self._ended)
        if self._failure is not None and self._handler is handler:
            self._lose(handler, self._failure)

    def _lose(self, handler: ResponseHandler, failure: str) -> None:
        self.abort()
        handler.lose(failure)

    def _not_http(self, error: object) -> None:
        self._keeps_alive = False
        self._fail(f"its response is not HTTP: {error}")

    def _fail(self, failure: str) -> None:
        if not self._ended and self._failure is None:
            self._failure = failure

    def connection_lost(self, error: Exception | None) -> None:
        """Hand on the end of the connection, which may also be the end of the response."""
        self._transport = None
        # The parser holds bound methods of this object: break the cycle.
        self._parser = None
        handler = self._handler
        if handler is None:
            return
        try:
            if error is None and self.status is not None and self._ends_with_connection:
                self._ended = True
                handler.take_piece(b"", self.read_at_s, ended=True)
            else:
                lost = f"the connection was lost: {error}" if error else "it closed the connection"
                self._lose(handler, lost)
        except Exception:
            handler.fault()

    def pause_writing(self) -> None:
        """Note that the engine reads slower than the client sends."""
        self._note_paused(True)

    def resume_writing(self) -> None:
        """Note that the engine took most of the written bytes."""
        self._note_paused(False)

    def _note_paused(self, paused: bool) -> None:
        self.writing_paused = paused
        if self._handler is not None:
            self._handler.engine_takes(more=not paused)

    # httptools

    def on_message_begin(self) -> None:
        """Note a second response, which belongs to no request."""
        if self._ended:
            self._keeps_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header line; lines after the head are trailers, which are dropped."""
        if self.status is None:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Handle a complete head; the head of an interim response (1xx) is dropped."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        self._head_bytes = 0
        if self._ended or (status < 200 and status != 101):
            return
        if status == 101 or status > 599:
            self._fail(f"it responded with the unusable status {status}")
            return
        self._accept_head(status)

    def _accept_head(self, status: int) -> None:
        codings, has_length = [], False
        for name, value in self.headers:
            if name == b"transfer-encoding":
                codings.append(value.lower())
            elif name == b"content-length":
                has_length = True
        if codings not in ([], [b"chunked"]):
            self._fail(f"its response has the transfer coding {codings}; only chunked is supported")
            return
        self._ends_with_connection = not codings and not has_length
        self.status, self.head_at_s = status, self.read_at_s
        if self._bodyless:
            # The parser keeps waiting for a body, so it cannot read another response.
            self._finish(keeps_alive=False)

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body."""
        self._head_bytes = 0
        if not self._ended and self._failure is None:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        """Note the end of a response, or drop an interim one."""
        if self.status is None:
            self.headers = []
        elif not self._ended:
            assert self._parser is not None
            self._finish(keeps_alive=self._parser.should_keep_alive())

    def _finish(self, *, keeps_alive: bool) -> None:
        self._ended = True
        self._keeps_alive = keeps_alive


# uvicorn, which vLLM and SGLang serve with, hangs up after 5 idle seconds; a request that meets
# this hanging up is lost, so the proxy must be first. It counts from when it read the end of the
# response, which on a busy machine is seconds after the engine sent it.
_IDLE_S = 2.0


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
                lambda: EngineConnection(self._monotonic),
                self._host,
                self._port,
                ssl=self._tls,
            )
        return connection

    def give_back(self, connection: EngineConnection) -> None:
        """Keep a connection whose exchange is over; close it if it cannot be reused."""
        connection.release()
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
