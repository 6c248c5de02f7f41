"""Scripted engines and clients on plain sockets, and the proxy with its recorded calls."""

import asyncio
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from agent.sources.client_connection import SocketClients
from agent.sources.listening import TlsFiles, open_socket
from agent.sources.proxy.exchange import Arrival, Ending, Exchange, Measuring, RawHeaders
from agent.sources.proxy.load_balancer import EngineLookup, ProxiedEngine
from agent.sources.proxy.outlier_detection import OutlierDetection
from agent.sources.proxy.relay_context import Clocks, ProxyLimits
from agent.sources.proxy.reverse_proxy import ProxyServer, ReverseProxy

# A test that hangs fails after this time.
WITHIN_S = 60.0

GET = b"GET /v1/models HTTP/1.1\r\nHost: proxy\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def post(body: bytes, path: str = "/v1/chat/completions", headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: proxy\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@dataclass(slots=True)
class Message:
    """A request or a response; `complete` is False if its body broke off."""

    first_line: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    complete: bool = True

    @property
    def status(self) -> int:
        return int(self.first_line.split()[1])

    def all(self, name: str) -> list[str]:
        return [value for one, value in self.headers if one.lower() == name]

    @property
    def length(self) -> int | None:
        return int(self.all("content-length")[0]) if self.all("content-length") else None


async def read_head(reader: asyncio.StreamReader) -> Message:
    """Read a head. Raises IncompleteReadError if the other side closes before it."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first_line, *lines = head.rstrip("\r\n").split("\r\n")
    headers = [(line.split(":", 1)[0], line.split(":", 1)[1].strip()) for line in lines]
    return Message(first_line, headers)


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    """Read a piece of a chunked body; the last one is empty."""
    size = int(await reader.readuntil(b"\r\n"), 16)
    return (await reader.readexactly(size + 2))[:size]


async def read_message(reader: asyncio.StreamReader, *, bodyless: bool = False) -> Message:
    """Read a request or response, up to where its body breaks off."""
    message, body = await read_head(reader), bytearray()
    if bodyless:
        return message
    try:
        if message.all("transfer-encoding") == ["chunked"]:
            while piece := await read_chunk(reader):
                body += piece
        elif message.length:
            body += await reader.readexactly(message.length)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        message.complete = False
        body += getattr(error, "partial", b"")
    message.body = bytes(body)
    return message


async def until_gone(reader: asyncio.StreamReader) -> bytes:
    """Read until the other side closes or resets the connection."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


@dataclass(slots=True)
class Visit:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    requests: list[Message]

    async def request(self) -> Message:
        message = await read_message(self.reader)
        self.requests.append(message)
        return message

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


Script = Callable[[Visit], Awaitable[None]]


@dataclass
class Engine:
    """An engine that runs a script on each connection and then closes it; keeps the requests."""

    script: Script
    name: str = "chat-0"
    tls: ssl.SSLContext | None = None
    requests: list[Message] = field(default_factory=list)
    visits: int = 0
    open: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    failures: list[Exception] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(
            self._visit, "127.0.0.1", 0, backlog=512, ssl=self.tls
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        assert self.failures == []

    @property
    def proxied(self) -> ProxiedEngine:
        scheme = "http" if self.tls is None else "https"
        return ProxiedEngine(self.name, f"{scheme}://127.0.0.1:{self.port}")

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.visits += 1
        self.open += 1
        try:
            # Most visits end when the proxy closes the connection.
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                await self.script(Visit(reader, writer, self.requests))
        except Exception as error:
            self.failures.append(error)
        finally:
            writer.close()
            self.open -= 1
            if not self.open:
                self.closed.set()


def responding(*responses: bytes) -> Script:
    """A script that sends these responses in turn, repeatedly, on each connection."""

    async def script(visit: Visit) -> None:
        while True:
            await once(visit)

    once = closing_after(*responses)
    return script


def closing_after(*responses: bytes) -> Script:
    """A script that sends these responses in turn and closes the connection."""

    async def script(visit: Visit) -> None:
        for response in responses:
            await visit.request()
            await visit.send(response)

    return script


def hanging_after(response: bytes) -> Script:
    """A script that reads a request, sends bytes and then nothing until the proxy closes."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(response)
        await until_gone(visit.reader)

    return script


@dataclass(slots=True)
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, request: bytes, *, bodyless: bool = False) -> Message:
        self.writer.write(request)
        return await read_message(self.reader, bodyless=bodyless)

    def leave(self) -> None:
        self.writer.transport.abort()


@dataclass(slots=True)
class Proxied:
    proxy: ReverseProxy
    server: ProxyServer
    port: int
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def open_requests(self) -> Mapping[str, int]:
        return self.proxy._context.balancer.open_requests

    @asynccontextmanager
    async def client(self, receive_bytes: int | None = None) -> AsyncIterator[Client]:
        connecting = socket.socket()
        if receive_bytes is not None:
            connecting.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connecting.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connecting, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=connecting)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()

    async def ask(self, request: bytes, *, bodyless: bool = False) -> Message:
        async with self.client() as client:
            return await client.ask(request, bodyless=bodyless)


ALL_HEALTHY = EngineLookup(models=lambda _: None, healthy=lambda _: True)
LIMITS = ProxyLimits(connect_s=5.0)


@asynccontextmanager
async def proxying(
    *engines: ProxiedEngine,
    measuring: Measuring | None = None,
    lookup: EngineLookup = ALL_HEALTHY,
    limits: ProxyLimits = LIMITS,
    sockets: Mapping[int, int] | None = None,
    outliers: OutlierDetection | None = None,
    monotonic: Callable[[], float] = time.monotonic,
    clients: SocketClients | None = None,
    listening_tls: TlsFiles | None = None,
) -> AsyncIterator[Proxied]:
    """Serve a proxy for engines on a free port; `sockets` are socket options."""
    failures: Counter[str] = Counter()
    proxy = ReverseProxy(
        engines,
        lookup,
        measuring=measuring,
        clocks=Clocks(time.time, monotonic),
        limits=limits,
        on_failure=lambda reason: failures.update([reason]),
        outliers=outliers,
    )
    listening = open_socket("proxy", "127.0.0.1", 0)
    for option, value in (sockets or {}).items():
        listening.setsockopt(socket.SOL_SOCKET, option, value)
    server = ProxyServer(proxy, listening, clients, listening_tls)
    server.start()
    try:
        yield Proxied(proxy, server, server.port, failures)
    finally:
        await proxy.close()
        await server.stop()


@asynccontextmanager
async def serving(
    script: Script, *, tls: ssl.SSLContext | None = None, **options: Any
) -> AsyncIterator[tuple[Engine, Proxied]]:
    """Serve a proxy for one engine; the options are those of `proxying`."""
    async with Engine(script, tls=tls) as engine, proxying(engine.proxied, **options) as proxied:
        yield engine, proxied


@asynccontextmanager
async def served(script: Script, **options: Any) -> AsyncIterator[tuple[Engine, Proxied, Client]]:
    """Serve the same to a client."""
    async with serving(script, **options) as (engine, proxied), proxied.client() as client:
        yield engine, proxied, client


@dataclass(slots=True)
class Recorded:
    """One exchange; its return values can be set, and the call that raises."""

    arrival: Arrival
    body: bytes | None = None
    headers: RawHeaders = ()
    added_headers: RawHeaders = ()
    model: str | None = None
    error_status: int | None = None
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    fails_at: str | None = None
    change: Callable[[bytes], bytes] = bytes
    last: bytes = b""
    response_headers: RawHeaders | None = None

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    @property
    def ending(self) -> Ending | None:
        """How it ended, None before its end."""
        return next((call[1] for call in self.calls if call[0] == "ended"), None)

    def sent(self, size_bytes: int) -> None:
        self._record("sent", size_bytes)

    def routed(self, engine: str) -> None:
        self._record("routed", engine)

    def answered(self, status: int, headers: RawHeaders, at_s: float) -> RawHeaders:
        self.times_s.append(at_s)
        self._record("answered", status, tuple(headers))
        return headers if self.response_headers is None else self.response_headers

    def chunk(self, data: bytes, at_s: float) -> bytes:
        self.times_s.append(at_s)
        self._record("chunk", data)
        return self.change(data)

    def passes(self, data: bytes) -> bool:
        return self.change is bytes and not self.last

    def catch_up(self) -> None:
        if self.fails_at == "catch_up":
            self._record("catch_up")

    def ended(self, ending: Ending, at_s: float) -> bytes:
        self.times_s.append(at_s)
        self._record("ended", ending)
        return self.last

    def _record(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        if self.fails_at == name:
            raise RuntimeError(f"{name} is broken")


class Recorder:
    """Measures every POST; `made` are the exchanges, which begin with the given fields."""

    def __init__(self, **fields: Any) -> None:
        self.made: list[Recorded] = []
        self._fields = fields

    def wants(self, method: str, path: str) -> bool:
        return method == "POST"

    def begin(self, arrival: Arrival) -> Exchange:
        exchange = Recorded(arrival, **self._fields)
        self.made.append(exchange)
        return exchange
