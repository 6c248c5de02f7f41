"""Limits of a listening socket, on real connections and a clock that the test sets."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from agent.app.listeners import API, OTLP_GRPC, OTLP_HTTP, PROXY, connections
from agent.sources import listening
from agent.sources.client_connection import ClientLimits, SocketClients
from agent.sources.listening import AsgiServer, open_socket
from tests.sources.proxy.wire import responding, serving

GET = b"GET / HTTP/1.1\r\nHost: agent\r\n\r\n"
MIB = 1024 * 1024
# So long as no sweep of the server itself cuts a client off.
LIMITS = ClientLimits(head_s=1000.0, body_s=1000.0, unread_s=1000.0)


@pytest.fixture(autouse=True)
def no_own_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tests sweep, as if it were later."""
    monkeypatch.setattr(listening, "_SWEEP_EVERY_S", 100_000.0)


@dataclass(slots=True)
class Guarded:
    """A server with limits; `size_bytes` is that of each response."""

    clients: SocketClients
    size_bytes: int = 0
    port: int = 0
    cut: Counter[str] = field(default_factory=Counter)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(self.size_bytes)})

    def connect(self, receive_bytes: int | None = None) -> socket.socket:
        client = socket.socket()
        if receive_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.settimeout(10)
        client.connect(("127.0.0.1", self.port))
        client.setblocking(False)
        return client

    async def asking(self) -> socket.socket:
        """A client whose response has begun."""
        client = self.connect(4096)
        client.send(GET)
        assert await receive(client, 12) == b"HTTP/1.1 200"
        return client

    def sweep(self, later_s: float) -> None:
        self.clients.sweep(asyncio.get_running_loop().time() + later_s)

    @property
    def waiting_bytes(self) -> int:
        return sum(client.unsent_bytes() for client in self.clients._clients)


Serving = Callable[..., AbstractAsyncContextManager[Guarded]]


@asynccontextmanager
async def guarded(limits: ClientLimits, size_bytes: int = 0) -> AsyncIterator[Guarded]:
    """An ASGI application with these limits."""
    cut: Counter[str] = Counter()
    clients = SocketClients("listen", limits, lambda _, reason: cut.update([reason]))
    served = Guarded(clients, size_bytes, cut=cut)
    server = AsgiServer(served, open_socket("listen", "127.0.0.1", 0), clients)
    server.start()
    served.port = server.port
    try:
        yield served
    finally:
        for client in clients:
            client.transport.abort()
        await server.stop()


@asynccontextmanager
async def guarded_proxy(limits: ClientLimits, size_bytes: int = 0) -> AsyncIterator[Guarded]:
    """A proxy with these limits, in front of an engine."""
    cut: Counter[str] = Counter()
    clients = SocketClients("listen", limits, lambda _, reason: cut.update([reason]))
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size_bytes
    engine = responding(head + bytes(size_bytes))
    async with serving(engine, clients=clients) as (_, proxied):
        yield Guarded(clients, size_bytes, proxied.port, cut)
        for client in clients:
            client.transport.abort()


@pytest.fixture(params=[guarded, guarded_proxy], ids=["application", "proxy"])
def served_by(request: pytest.FixtureRequest) -> Serving:
    """Both kinds of servers with clients' connections of the agent's own."""
    server: Serving = request.param
    return server


async def receive(client: socket.socket, size_bytes: int = 4096) -> bytes:
    """Some bytes; none if the other side closed the connection."""
    try:
        return await asyncio.get_running_loop().sock_recv(client, size_bytes)
    except ConnectionError:
        return b""


async def take(client: socket.socket, size_bytes: int) -> None:
    left_bytes = size_bytes
    while left_bytes > 0:
        part = await receive(client, left_bytes)
        assert part
        left_bytes -= len(part)


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0)


async def test_a_response_above_the_limit_for_slow_clients_reaches_the_clients_that_read() -> None:
    limits = replace(LIMITS, unread_bytes=MIB, send_buffer_bytes=128 * 1024)
    async with guarded(limits, 4 * MIB) as served:
        with ExitStack() as stack:
            clients = [stack.enter_context(await served.asking()) for _ in range(3)]
            # The first one does not read, though its kernel may take a last part after some sweeps.
            # The others take something between any two sweeps.
            for step in range(6):
                served.sweep(0.9 * step)
                for client in clients[1:]:
                    await take(client, MIB // 4)
            assert served.cut == {"responses_wait": 1}
            for client in clients[1:]:
                await take(client, 2 * MIB)
            assert served.cut == {"responses_wait": 1}


async def test_clients_that_do_not_read_are_cut_until_the_rest_is_within_the_limit() -> None:
    limits = replace(LIMITS, unread_s=100.0, unread_bytes=8 * MIB, send_buffer_bytes=128 * 1024)
    async with guarded(limits, 2 * MIB) as served:
        with ExitStack() as stack:
            for _ in range(12):
                stack.enter_context(await served.asking())
            served.sweep(0.0)
            assert served.cut == {}
            served.sweep(1.0)
            kept = 12 - served.cut["responses_wait"]
            assert kept in (4, 5)
            await until(lambda: 4 * MIB < served.waiting_bytes <= 8 * MIB)
            served.sweep(99.0)
            assert served.cut["response_unread"] == 0
            # A kernel may have taken a last part before the sweep at 99 s.
            served.sweep(201.0)
            assert served.cut["response_unread"] == kept
            await until(lambda: served.waiting_bytes == 0)


@pytest.mark.parametrize(
    ("limits", "times_s", "cut"),
    [
        pytest.param(ClientLimits(head_s=1000.0, unread_s=10.0), range(0, 220, 11), {}, id="one"),
        # Together they may not keep the memory.
        pytest.param(
            replace(LIMITS, unread_bytes=MIB, slow_s=10.0),
            (0.0, 0.9, 1.8, 9.9),
            {"responses_wait": 1},
            id="above the limit",
        ),
    ],
)
async def test_a_client_that_always_takes_a_little_is_not_cut_unless_too_much_waits(
    limits: ClientLimits, times_s: Sequence[float], cut: dict[str, int]
) -> None:
    async with guarded(limits, 16 * MIB) as served:
        with await served.asking() as client:
            for later_s in times_s:
                served.sweep(later_s)
                assert served.cut == {}
                # More than a receive buffer, so that its kernel takes more.
                for _ in range(4):
                    await receive(client)
            served.sweep(times_s[-1] + 0.2)
            assert served.cut == cut


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"", "head_too_slow"),
        (b"GET / HTTP/1.1\r\nHost:", "head_too_slow"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc", "body_too_slow"),
        (GET + b"GET / HTTP/1.1\r\n", "head_too_slow"),
        (GET + b"\r\n", "head_too_slow"),
    ],
)
async def test_a_request_that_never_ends_is_cut(
    served_by: Serving, sent: bytes, reason: str
) -> None:
    async with served_by(ClientLimits(head_s=20.0, body_s=20.0)) as served:
        with served.connect() as client:
            client.send(sent)
            if sent.startswith(GET):
                assert (await receive(client)).startswith(b"HTTP/1.1 200")
            else:
                await until(lambda: served.clients._clients)
                for _ in range(100):
                    await asyncio.sleep(0)
            served.sweep(15.0)
            assert served.cut == {}
            served.sweep(130.0)
            # A line end that came with the request before begins no head: the client is idle.
            idle = served_by is guarded_proxy and sent == GET + b"\r\n"
            assert served.cut == ({} if idle else {reason: 1})
            last = await receive(client)
            assert last.startswith(b"HTTP/1.1 408") if reason == "body_too_slow" else last == b""


async def test_a_client_that_takes_nothing_of_its_response_is_cut(served_by: Serving) -> None:
    async with served_by(replace(LIMITS, unread_s=10.0), 16 * MIB) as served:
        with await served.asking():
            await until(lambda: served.waiting_bytes)
            for later_s in (0.0, 5.0, 9.0):
                served.sweep(later_s)
                assert served.cut == {}
            # Its kernel may have taken a part until now.
            later_s = 20.0
            while not served.cut:
                served.sweep(later_s)
                later_s += 11.0
            assert served.cut == {"response_unread": 1}
            assert later_s < 50.0


async def test_an_idle_client_of_the_proxy_is_not_cut_but_its_connection_is_closed() -> None:
    async with guarded_proxy(ClientLimits(head_s=20.0)) as served:
        with await served.asking() as client:
            await take(client, len(b" OK\r\ncontent-length: 0\r\n\r\n"))
            served.sweep(74.0)
            await asyncio.sleep(0)
            (connection,) = served.clients
            assert not connection.transport.is_closing()
            served.sweep(76.0)
            assert await receive(client) == b""
            assert served.cut == {}


@pytest.mark.parametrize("descriptors", [64, 256, 1024, 4096, 16_384])
def test_all_sockets_together_leave_descriptors(descriptors: int) -> None:
    limits = connections(descriptors)
    # Half as many again wait to be accepted, and a proxied client has a connection to an engine.
    taken = sum(limits[setting] * 3 // 2 for setting in (API, OTLP_HTTP, OTLP_GRPC))
    taken += limits[PROXY] * 5 // 2
    assert taken <= descriptors - min(128, descriptors // 2)
    assert limits[PROXY] >= max(limits[API], 4)
