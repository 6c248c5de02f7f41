"""Clients that leave, clients and engines that read slowly, and many clients."""

import asyncio
import contextlib
import random
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.sources.listening import TlsFiles
from agent.sources.proxy.engine_connection import ConnectionPool, EngineConnection
from agent.sources.proxy.exchange import Ending
from tests.real_parts.certificates import make_certificate
from tests.sources.proxy.wire import (
    CHUNKED,
    GET,
    LAST_CHUNK,
    OK,
    Client,
    Engine,
    Proxied,
    Recorder,
    Visit,
    chunk,
    post,
    proxying,
    read_head,
    read_message,
    responding,
    served,
    serving,
    until_gone,
)

ASK = post(b"{}")


class Watched:
    """A script that reads a request, sends bytes, and waits until the proxy closes."""

    def __init__(self, response: bytes) -> None:
        self.received, self.left = asyncio.Event(), asyncio.Event()
        self._response = response

    async def __call__(self, visit: Visit) -> None:
        await visit.request()
        await visit.send(self._response)
        self.received.set()
        assert await until_gone(visit.reader) == b""
        self.left.set()


@pytest.mark.parametrize("half", [False, True], ids=["closes", "closes its sending side"])
@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"", id="before the response"),
        pytest.param(CHUNKED, id="before the first byte of the body"),
        pytest.param(CHUNKED + chunk(b"data: {}\n\n"), id="in a stream"),
        pytest.param(OK.replace(b"h: 2", b"h: 99"), id="in a whole response"),
    ],
)
async def test_the_engine_is_freed_when_the_client_leaves(said: bytes, half: bool) -> None:
    watched, recorder = Watched(said), Recorder()
    async with serving(watched, measuring=recorder) as (_, proxied):
        async with proxied.client() as client:
            client.writer.write(ASK)
            await watched.received.wait()
            assert proxied.open_requests == {"chat-0": 1}
            if half:
                client.writer.write_eof()
            else:
                client.leave()
            await watched.left.wait()
        await nothing_left(proxied)
    assert recorder.made[0].ending is Ending.CLIENT_GONE


async def test_a_client_that_leaves_while_the_proxy_connects_frees_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connecting, left = asyncio.Event(), asyncio.Event()
    connect = ConnectionPool.connect

    async def late(pool: ConnectionPool) -> EngineConnection:
        connecting.set()
        await left.wait()
        return await connect(pool)

    monkeypatch.setattr(ConnectionPool, "connect", late)
    watched, recorder = Watched(CHUNKED), Recorder()
    async with serving(watched, measuring=recorder) as (_, proxied):
        async with proxied.client() as client:
            client.writer.write(ASK)
            await connecting.wait()
            client.leave()
        # The proxy has read that the client left before it refuses a later one.
        assert (await proxied.ask(b"GARBAGE\r\n\r\n")).status == 400
        left.set()
        await nothing_left(proxied)
    assert recorder.made[0].ending is Ending.CLIENT_GONE


async def test_a_response_before_the_end_of_the_request_is_relayed() -> None:
    refusal = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno"

    async def script(visit: Visit) -> None:
        await read_head(visit.reader)
        await visit.send(refusal)
        await until_gone(visit.reader)

    async with served(script) as (engine, _, client):
        client.writer.write(post(b"x" * 1000)[:-3])
        message = await read_message(client.reader)
        assert (message.status, message.body) == (413, b"no")
        await engine.closed.wait()


async def nothing_left(proxied: Proxied) -> None:
    """Wait until the proxy has no open requests; the test's time limit bounds the wait."""
    while proxied.proxy.live or any(proxied.open_requests.values()):
        await asyncio.sleep(0)


PIECE = bytes(64 * 1024)
PIECES = 1000
# More than the kernel buffers between engine and proxy, and a small part of all pieces.
MOST_PIECES = 250


def numbered(number: int) -> bytes:
    """A piece that shows its place."""
    return number.to_bytes(8) + PIECE[8:]


async def stalled(count: Callable[[], int]) -> int:
    """Return a count that did not change while another proxy relayed twenty requests."""
    before = -1
    async with serving(responding(OK)) as (_, elsewhere):
        while before != count():
            before = count()
            for _ in range(20):
                assert (await elsewhere.ask(GET)).body == b"ok"
    return before


async def test_a_client_that_does_not_read_pauses_its_engine_and_loses_nothing() -> None:
    pushed, begun = 0, asyncio.Event()

    async def push(visit: Visit) -> None:
        nonlocal pushed
        await visit.request()
        await visit.send(CHUNKED)
        begun.set()
        for number in range(PIECES):
            await visit.send(chunk(numbered(number)))
            pushed += 1
        await visit.send(LAST_CHUNK)

    small_buffers = {socket.SO_SNDBUF: 64 * 1024}
    async with (
        serving(push, sockets=small_buffers) as (_, proxied),
        proxied.client(receive_bytes=64 * 1024) as client,
    ):
        client.writer.write(ASK)
        await begun.wait()
        assert 0 < await stalled(lambda: pushed) < MOST_PIECES
        got = (await read_message(client.reader)).body
        # No assertion shows all bytes.
        assert (got == b"".join(map(numbered, range(PIECES)))) is True


async def test_an_engine_that_does_not_read_pauses_its_client() -> None:
    pushed, go_on = 0, asyncio.Event()

    async def script(visit: Visit) -> None:
        visit.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await go_on.wait()
        visit.writer.transport.resume_reading()  # type: ignore[attr-defined]
        message = await visit.request()
        assert len(message.body) == PIECES * len(PIECE)
        await visit.send(OK)

    async def push() -> None:
        nonlocal pushed
        for _ in range(PIECES):
            client.writer.write(PIECE)
            await client.writer.drain()
            pushed += 1

    async with served(script, sockets={socket.SO_RCVBUF: 64 * 1024}) as (_, _, client):
        client.writer.write(post(b"")[:-5] + b"%d\r\n\r\n" % (PIECES * len(PIECE)))
        pushing = asyncio.create_task(push())
        assert 0 < await stalled(lambda: pushed) < MOST_PIECES
        go_on.set()
        await pushing
        assert (await read_message(client.reader)).body == b"ok"


CLIENTS = 200
AT_ONCE = 50


async def streaming(visit: Visit) -> None:
    """Respond with streams of ten events, one turn of the loop apart."""
    while True:
        await visit.request()
        await visit.send(CHUNKED)
        for _ in range(10):
            await visit.send(chunk(b"data: {}\n\n"))
            await asyncio.sleep(0)
        await visit.send(LAST_CHUNK)


async def test_hundreds_of_clients_that_leave_at_random_leave_nothing_behind() -> None:
    seeded, recorder = random.Random(7), Recorder()

    async def come_and_go() -> None:
        async with proxied.client() as client:
            size = seeded.choice([40, len(ASK) - 1, len(ASK), len(ASK), len(ASK)])
            client.writer.write(ASK[:size])
            # Fewer reads than a response has pieces.
            for _ in range(seeded.randrange(12) if size == len(ASK) else 0):
                await client.reader.read(20)
            client.leave()

    async def some() -> None:
        for _ in range(CLIENTS // AT_ONCE):
            await come_and_go()

    async with serving(streaming, measuring=recorder) as (engine, proxied):
        # The server has all its tasks once it has served a request.
        await proxied.ask(ASK)
        await nothing_left(proxied)
        tasks_before = len(asyncio.all_tasks()) - engine.open
        await asyncio.gather(*(some() for _ in range(AT_ONCE)))
        await nothing_left(proxied)
        while len(asyncio.all_tasks()) > tasks_before + engine.open:
            await asyncio.sleep(0)
        assert proxied.failures == {}
        assert (await proxied.ask(ASK)).body == b"data: {}\n\n" * 10
        await proxied.proxy.close()
        if engine.open:
            await engine.closed.wait()
    endings = {exchange.ending for exchange in recorder.made}
    assert endings == {Ending.CLIENT_GONE, Ending.COMPLETE}
    assert all(exchange.names.count("ended") == 1 for exchange in recorder.made)


async def test_a_stream_that_exceeds_the_drain_limit_is_cut_and_counted() -> None:
    streaming, silent = Watched(CHUNKED + chunk(b"one")), Watched(b"")
    recorder = Recorder()
    async with (
        Engine(streaming) as engine,
        Engine(silent, "chat-1") as other,
        proxying(engine.proxied, other.proxied, measuring=recorder) as proxied,
        proxied.client() as client,
        proxied.client() as waiting,
    ):
        client.writer.write(ASK)
        await streaming.received.wait()
        waiting.writer.write(ASK)
        await silent.received.wait()
        assert await proxied.proxy.drain(0.01) == 2
        message = await read_message(client.reader)
        assert (message.body, message.complete) == (b"one", False)
        assert (await read_message(waiting.reader)).status == 503
        await other.closed.wait()
        assert proxied.open_requests == {"chat-0": 0, "chat-1": 0}
        assert proxied.proxy.live == 0
    assert [exchange.ending for exchange in recorder.made] == [Ending.REFUSED] * 2


async def test_a_client_whose_head_is_not_complete_at_a_stop_gets_its_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.sources.proxy.reverse_proxy._LAST_REQUEST_S", 0.05)
    async with served(responding(OK)) as (_, proxied, client), proxied.client() as unused:
        client.writer.write(GET[:8])
        # Connections are taken in turn: after this one, those before it are, too.
        await proxied.ask(GET)
        stopped = asyncio.create_task(proxied.server.stop(within_s=None))
        with contextlib.suppress(ConnectionError):
            while True:
                _, writer = await asyncio.open_connection("127.0.0.1", proxied.port)
                writer.close()
                await writer.wait_closed()
        assert await unused.reader.read() == b""
        assert (await client.ask(GET[8:])).body == b"ok"
        await stopped


async def test_the_connection_of_a_client_of_http_1_0_ends_with_its_stream() -> None:
    async with served(responding(CHUNKED + chunk(b"one") + LAST_CHUNK)) as (_, _, client):
        message = await client.ask(b"GET /v1/models HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert message.body == b"one"
        assert message.all("connection") == ["close"]
        assert await client.reader.read() == b""


async def test_clients_with_tls_are_served_and_free_the_engine_when_they_leave(
    tmp_path: Path,
) -> None:
    files = make_certificate(tmp_path, "proxy")
    trusting = ssl.create_default_context(cafile=str(files.certificate))
    trusting.check_hostname = False
    tls = TlsFiles(files.certificate, files.key)
    watched = Watched(CHUNKED + chunk(b"one"))
    async with (
        Engine(responding(OK)) as engine,
        proxying(engine.proxied, listening_tls=tls) as proxied,
        proxied.client() as plain,
    ):
        plain.writer.write(GET)
        assert await until_gone(plain.reader) == b""
        reader, writer = await asyncio.open_connection("127.0.0.1", proxied.port, ssl=trusting)
        client = Client(reader, writer)
        for _ in range(2):
            assert (await client.ask(ASK)).body == b"ok"
        assert engine.requests[0].all("x-forwarded-proto") == ["https"]
        # The next connection to the engine meets the other script.
        engine.script = watched
        proxied.proxy._context.pools["chat-0"].close()
        writer.write(ASK)
        await watched.received.wait()
        client.leave()
        await watched.left.wait()
        await nothing_left(proxied)


async def test_pipelined_requests_are_relayed_one_after_another() -> None:
    order: list[str] = []

    async def script(visit: Visit) -> None:
        while True:
            request = await visit.request()
            order.append(request.first_line.split()[1])
            assert proxied.open_requests == {"chat-0": 1}
            await visit.send(OK)

    async with served(script) as (_, proxied, client):
        client.writer.write(b"".join(GET.replace(b"models", b"%d" % n) for n in range(5)))
        for _ in range(5):
            assert (await read_message(client.reader)).body == b"ok"
    assert order == [f"/v1/{number}" for number in range(5)]


async def test_a_rest_of_a_body_after_its_response_is_no_next_request() -> None:
    async def script(visit: Visit) -> None:
        await read_head(visit.reader)
        await visit.send(OK)
        await until_gone(visit.reader)

    body = GET.replace(b"models", b"smuggled")
    async with served(script) as (engine, _, client):
        client.writer.write(post(body + body)[: -len(body)])
        assert (await read_message(client.reader)).body == b"ok"
        engine.script = responding(OK)
        assert (await client.ask(body + GET)).body == b"ok"
    assert [each.first_line for each in engine.requests] == ["GET /v1/models HTTP/1.1"]
