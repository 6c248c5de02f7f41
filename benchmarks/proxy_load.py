"""A load generator: streams over keep-alive connections, with little processor time."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Self

_LAST = b"0\r\n\r\n"
_EVENT = b"data: "
BEGIN_WITHIN_S = 1.0


def chat(
    port: int,
    prompt: str,
    request_id: str | None = None,
    *,
    model: str = "m",
    key: str = "none",
) -> bytes:
    """Return a request for a stream, with a prompt of about a hundred words."""
    body = {
        "model": model,
        "stream": True,
        "messages": [{"role": "user", "content": prompt + " word" * 100}],
    }
    data = json.dumps(body).encode()
    named = "" if request_id is None else f"X-Request-Id: {request_id}\r\n"
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\nAccept: */*\r\n"
        f"{named}User-Agent: benchmark\r\nContent-Length: {len(data)}\r\n\r\n"
    ).encode() + data


class LoadConnection(asyncio.Protocol):
    """A connection that carries one request at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] | None = None
        self._first: asyncio.Future[float] | None = None
        self._tail = b""
        # When data came, if `gaps_s` is asked for.
        self._arrivals_s: list[float] | None = None
        self.transport: asyncio.Transport

    @classmethod
    async def connect(cls, port: int) -> Self:
        """Connect to a local port."""
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(cls, "127.0.0.1", port))[1]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._arrivals_s is not None:
            self._arrivals_s.append(time.perf_counter())
        if self._first is not None and not self._first.done() and _EVENT in data:
            self._first.set_result(time.perf_counter())
        self._tail = (self._tail + data)[-len(_LAST) :]
        if self._tail == _LAST and self._end is not None and not self._end.done():
            self._end.set_result(None)

    def connection_lost(self, _: Exception | None) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_exception(ConnectionError("the stream broke off"))

    async def first_event(self, request: bytes) -> None:
        """Send a request and wait for the first event."""
        self._first = self._loop.create_future()
        self.transport.write(request)
        await self._first

    async def ttft_s(self, request: bytes) -> float:
        """Send a request, read the whole stream, and return the time to its first event."""
        self._end, self._first = self._loop.create_future(), self._loop.create_future()
        self._tail = b""
        began = time.perf_counter()
        self.transport.write(request)
        await self._end
        return self._first.result() - began

    async def arrivals_s(self, request: bytes) -> list[float]:
        """Send a request, read the whole stream, and return when its pieces came."""
        self._arrivals_s = arrivals_s = list[float]()
        await self.ttft_s(request)
        self._arrivals_s = None
        return arrivals_s


@asynccontextmanager
async def connections(port: int, number: int) -> AsyncIterator[list[LoadConnection]]:
    """Open a number of connections, and close them at the end."""
    opened = [await LoadConnection.connect(port) for _ in range(number)]
    try:
        yield opened
    finally:
        for connection in opened:
            connection.transport.abort()


async def run_load(
    port: int, prompt: str, *, at_once: int, requests: int, pause_s: float = 0.0
) -> tuple[float, list[float]]:
    """Return the seconds for all requests, and the time to first event of each.

    Each connection sends its next request `pause_s` after the end of a response.
    """
    request, ttfts_s = chat(port, prompt), list[float]()

    async def sequence(connection: LoadConnection) -> None:
        for _ in range(requests // at_once):
            ttfts_s.append(await connection.ttft_s(request))
            if pause_s:
                await asyncio.sleep(pause_s)

    async with connections(port, at_once) as opened:
        began = time.perf_counter()
        await asyncio.gather(*map(sequence, opened))
        return time.perf_counter() - began, ttfts_s


async def run_gaps(port: int, prompt: str, streams: int) -> list[float]:
    """Return the gaps of streams that begin one after another within a second, and run at once."""
    request = chat(port, prompt)

    async def begin_later(connection: LoadConnection, delay_s: float) -> list[float]:
        await asyncio.sleep(delay_s)
        return await connection.arrivals_s(request)

    async with connections(port, streams) as opened:
        delays_s = [BEGIN_WITHIN_S * place / streams for place in range(streams)]
        each = await asyncio.gather(*map(begin_later, opened, delays_s))
    return [later - earlier for arrivals_s in each for earlier, later in pairwise(arrivals_s)]
