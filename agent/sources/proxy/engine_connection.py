"""HTTP/1.1 connections to an engine, and the pool that keeps idle ones.

aiohttp's client is not used here because its session adds more to the time to the first token than
a whole router in Rust does (`benchmarks/proxy.py`). The parser is the same llhttp.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from ssl import SSLContext
from typing import cast
from urllib.parse import urlsplit

import httptools

from agent.sources.proxy.headers import HeaderLines

# Above this the connection pauses reading until the relay took the pieces.
_MAX_HELD_BYTES = 64 * 1024
# Limit of a head, and of the lines between two pieces of a body.
_MAX_HEAD_BYTES = 256 * 1024


class EngineConnection(asyncio.Protocol):
    """Carries one request and its response at a time; every piece keeps the time of its read.

    `status` is None until the head of the response arrived. `read_at_s` is the time of the last
    read. `failure` is a sentence about why there is no response, or why it broke off. `pass_on`
    takes a piece in the moment in which it arrives, or declines it; `read` has the others.
    """

    __slots__ = (
        "_bodyless",
        "_drained",
        "_ended",
        "_ends_with_connection",
        "_head_bytes",
        "_held_bytes",
        "_keeps_alive",
        "_loop",
        "_monotonic",
        "_parser",
        "_paused",
        "_pieces",
        "_reads",
        "_transport",
        "_waiter",
        "failure",
        "head_at_s",
        "headers",
        "idle_since_s",
        "pass_on",
        "read_at_s",
        "status",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, monotonic: Callable[[], float]) -> None:
        self._loop = loop
        self._monotonic = monotonic
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self.failure: str | None = None
        self.idle_since_s = 0.0
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
        self._pieces: list[bytes] = []
        self._reads: list[tuple[bytes, float]] = []
        self._held_bytes = self._head_bytes = 0
        self._paused = False
        self.pass_on: Callable[[bytes, float], bool] | None = None

    # To the engine

    def send_request(self, data: bytes, *, bodyless: bool) -> None:
        """Write a request, or its beginning; `bodyless` if the response has no body: HEAD."""
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
            # aiohttp's client accepts the same two deviations.
            self._parser.set_dangerous_leniencies(
                lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
            )
        self._reset(bodyless=bodyless)
        self.write(data)

    def write(self, data: bytes) -> None:
        """Write more of a request's body; does nothing after the engine closed the connection."""
        if self._transport is not None:
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait until the engine took most of the written bytes, or closed the connection."""
        if self._drained is not None:
            await self._drained

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call when the engine took most of the written bytes, or closed the connection."""
        if self._drained is None:
            call()
        else:
            self._drained.add_done_callback(lambda _: call())

    def abort(self) -> None:
        """Close at once, so that the engine stops working on the request."""
        if self._transport is not None:
            self._transport.abort()

    # From the engine

    @property
    def complete(self) -> bool:
        """Whether the response has ended and all of it was read."""
        return self._ended and not self._reads

    @property
    def reusable(self) -> bool:
        """Whether the connection can carry another request."""
        return (
            self.complete
            and self._keeps_alive
            and self._transport is not None
            and not self._transport.is_closing()
        )

    async def wait_for_head(self, limit_s: float | None) -> None:
        """Wait for the head of the response. Raises ConnectionError or TimeoutError."""
        while self.status is None:
            await self._progress(limit_s)

    async def read(self, limit_s: float | None) -> list[tuple[bytes, float]]:
        """Return the pieces since the last call, each with the time of its read; none at the end.

        Raises ConnectionError if the response broke off, and TimeoutError.
        """
        while not self._reads and not self._ended:
            await self._progress(limit_s)
        reads, self._reads = self._reads, []
        self._held_bytes = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return reads

    async def _progress(self, limit_s: float | None) -> None:
        if self.failure is not None:
            raise ConnectionError(self.failure)
        self._waiter = self._loop.create_future()
        try:
            if limit_s is None:
                await self._waiter
            else:
                async with asyncio.timeout(limit_s):
                    await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, failure: str) -> None:
        if self.failure is None:
            self.failure = failure
        self.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport of the new connection."""
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse bytes of a response."""
        self.read_at_s = self._monotonic()
        if self._parser is None or self._ended:
            self._fail("it sent data that belongs to no request")
            return
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._not_http("it switched to another protocol")
        except httptools.HttpParserError as error:
            self._not_http(error)
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            if self._passes(piece):
                return
            self._keep(piece)
        elif self._head_bytes > _MAX_HEAD_BYTES and not self._ended:
            self._fail(f"the head of its response exceeds {_MAX_HEAD_BYTES} bytes")
        self._wake()

    def _not_http(self, error: object) -> None:
        self._keeps_alive = False
        if not self._ended:
            self._fail(f"its response is not HTTP: {error}")

    def _passes(self, piece: bytes) -> bool:
        """Whether a piece was passed on: the relay has all before it and waits for this one."""
        waiter = self._waiter
        if self.pass_on is None or waiter is None or waiter.done():
            return False
        return not self._ended and self.failure is None and self.pass_on(piece, self.read_at_s)

    def _keep(self, data: bytes) -> None:
        self._reads.append((data, self.read_at_s))
        self._held_bytes += len(data)
        if self._held_bytes > _MAX_HELD_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Note the end of the connection, which may also be the end of the response."""
        self._transport = None
        # The parser holds bound methods of this object: break the cycle.
        self._parser = None
        if error is None and self.status is not None and self._ends_with_connection:
            self._ended = True
        elif self.failure is None:
            self.failure = (
                f"the connection was lost: {error}" if error else "it closed the connection"
            )
        self.resume_writing()
        self._wake()

    def pause_writing(self) -> None:
        """Make `drain` wait: the engine reads slower than the client sends."""
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        """Let `drain` return: the engine took most of the written bytes."""
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None

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
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            self._fail(f"its response has the transfer coding {codings}; only chunked is supported")
            return
        has_length = any(name == b"content-length" for name, _ in self.headers)
        self._ends_with_connection = not codings and not has_length
        self.status, self.head_at_s = status, self.read_at_s
        if self._bodyless:
            # The parser keeps waiting for a body, so it cannot read another response.
            self._finish(keeps_alive=False)

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body."""
        self._head_bytes = 0
        if not self._ended:
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
