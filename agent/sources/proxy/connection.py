"""One HTTP/1.1 connection to an engine.

aiohttp's client is not used here because its session adds more to the time to the first token than
a whole router in Rust does (`benchmarks/proxy.py`). The parser is the same llhttp.
"""

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from agent.sources.proxy.headers import HeaderLines

# Beyond this the engine is not read from until the client has taken what there is.
HELD_BYTES = 64 * 1024
# What a head, or the lines between two pieces of a body, may take before it counts as endless.
_MAX_SILENT_BYTES = 256 * 1024


class EngineConnection(asyncio.Protocol):
    """Carries one request and its answer at a time; every piece keeps the time of its read.

    `status` is None until the head of the answer is there, `read_at_s` is when something last came,
    and `failure` says in words why an answer cannot be had or continued.
    """

    __slots__ = (
        "_bodyless",
        "_drained",
        "_ends_with_connection",
        "_held_bytes",
        "_keeps_alive",
        "_loop",
        "_monotonic",
        "_over",
        "_parser",
        "_parts",
        "_paused",
        "_reads",
        "_silent_bytes",
        "_transport",
        "_waiter",
        "failure",
        "head_at_s",
        "headers",
        "idle_since_s",
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
        self._expect_answer(bodyless=False)

    def _expect_answer(self, *, bodyless: bool) -> None:
        self.status: int | None = None
        self.headers: HeaderLines = []
        self.head_at_s = 0.0
        self.read_at_s = 0.0
        self._bodyless = bodyless
        self._ends_with_connection = False
        self._keeps_alive = False
        self._over = False
        self._parts: list[bytes] = []
        self._reads: list[tuple[bytes, float]] = []
        self._held_bytes = self._silent_bytes = 0
        self._paused = False

    # To the engine

    def send_request(self, data: bytes, *, bodyless: bool) -> None:
        """Write a request, or its beginning; `bodyless` where its answer has no body: HEAD."""
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
            # The two liberties that aiohttp's client allows servers as well.
            self._parser.set_dangerous_leniencies(
                lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
            )
        self._expect_answer(bodyless=bodyless)
        self.write(data)

    def write(self, data: bytes) -> None:
        """Write more of a request's body; nothing where the engine has gone."""
        if self._transport is not None:
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait until the engine has taken most of what was written, or has gone."""
        if self._drained is not None:
            await self._drained

    def abort(self) -> None:
        """Close at once, so that the engine sees that nobody waits for its answer."""
        if self._transport is not None:
            self._transport.abort()

    # From the engine

    @property
    def complete(self) -> bool:
        """Whether the answer is over and all of it was read."""
        return self._over and not self._reads

    @property
    def reusable(self) -> bool:
        """Whether another request may follow on this connection."""
        return (
            self.complete
            and self._keeps_alive
            and self._transport is not None
            and not self._transport.is_closing()
        )

    async def answer(self, limit_s: float | None) -> None:
        """Wait for the head of the answer. ConnectionError, TimeoutError."""
        while self.status is None:
            await self._progress(limit_s)

    async def read(self, limit_s: float | None) -> list[tuple[bytes, float]]:
        """What came since the last call, each piece with the time of its read; at the end nothing.

        ConnectionError where the answer stopped before its end, TimeoutError.
        """
        while not self._reads and not self._over:
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
        """The engine took the connection."""
        # uvloop's transports are none of asyncio's by class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer came."""
        self.read_at_s = self._monotonic()
        if self._parser is None or self._over:
            self._fail("it sent more than was asked for")
            return
        self._silent_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._not_http(error)
        if self._parts:
            self._keep(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts))
        elif self._silent_bytes > _MAX_SILENT_BYTES and not self._over:
            self._fail("its answer has a head without end")
        self._wake()

    def _not_http(self, error: Exception) -> None:
        self._keeps_alive = False
        if not self._over:
            self._fail(f"what it sent is not HTTP: {error}")

    def _keep(self, data: bytes) -> None:
        self._parts = []
        self._reads.append((data, self.read_at_s))
        self._held_bytes += len(data)
        if self._held_bytes > HELD_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection ended, which may be how the answer ends."""
        self._transport = None
        # The parser holds this object by its methods.
        self._parser = None
        if error is None and self.status is not None and self._ends_with_connection:
            self._over = True
        elif self.failure is None:
            self.failure = f"the connection was lost: {error}" if error else "it hung up"
        self.resume_writing()
        self._wake()

    def pause_writing(self) -> None:
        """The engine does not take the request as fast as it comes."""
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        """The engine took most of what was written."""
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None

    # httptools

    def on_message_begin(self) -> None:
        """An answer begins; one after the end of ours belongs to nobody."""
        if self._over:
            self._keeps_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header line came; those after the head are trailers, which are dropped."""
        if self.status is None:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """A head is complete: the answer's, or that of an interim answer, which is dropped."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        self._silent_bytes = 0
        if self._over or (status < 200 and status != 101):
            return
        if status == 101 or status > 599:
            self._fail(f"it answered with the status {status}, which nobody can use")
            return
        self._take_head(status)

    def _take_head(self, status: int) -> None:
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            self._fail(f"its answer has the transfer coding {codings}; only chunked is HTTP/1.1's")
            return
        named = any(name == b"content-length" for name, _ in self.headers)
        self._ends_with_connection = not codings and not named
        self.status, self.head_at_s = status, self.read_at_s
        if self._bodyless:
            # The parser goes on to wait for a body, so that it cannot read another answer.
            self._finish(keeps_alive=False)

    def on_body(self, body: bytes) -> None:
        """A piece of the body came."""
        self._silent_bytes = 0
        if not self._over:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        """An answer is complete, or an interim one."""
        if self.status is None:
            self.headers = []
        elif not self._over:
            assert self._parser is not None
            self._finish(keeps_alive=self._parser.should_keep_alive())

    def _finish(self, *, keeps_alive: bool) -> None:
        self._over = True
        self._keeps_alive = keeps_alive
