"""Listening sockets and embedded servers."""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
import uvloop

from agent.errors import SettingsInvalid
from agent.sources.client_connection import ClientLimits, SocketClients
from agent.sources.listening import AsgiServer, open_socket

WITHIN_S = 10.0


class Application:
    """An ASGI application that responds `there`, on /slow only after `go_on`."""

    def __init__(self) -> None:
        self.received, self.go_on = threading.Event(), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.received.set()
        if scope["path"] == "/slow":
            await self.go_on.wait()
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"there"})


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as running:
        yield running


def get(port: int, path: str = "/") -> str:
    """Return the body of a response. Raises requests.ConnectionError without a server."""
    return requests.get(f"http://127.0.0.1:{port}{path}", timeout=WITHIN_S).text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_port_zero_takes_a_free_one(host: str) -> None:
    with open_socket("listen", host, 0) as first, open_socket("listen", host, 0) as second:
        ports = {first.getsockname()[1], second.getsockname()[1]}
        assert len(ports) == 2
        assert 0 not in ports
        socket.create_connection((host, first.getsockname()[1]), timeout=WITHIN_S).close()


@pytest.mark.parametrize(
    ("host", "port", "reason"),
    [
        ("no-such-host.invalid", 4318, "Name or service not known"),
        ("192.0.2.1", 4318, "Cannot assign requested address"),
    ],
)
def test_an_unusable_address_is_a_settings_error(host: str, port: int, reason: str) -> None:
    with pytest.raises(SettingsInvalid) as failure:
        open_socket("otlp.http", host, port)
    (problem,) = failure.value.problems
    assert problem.startswith(f"otlp.http: cannot listen on {host}:{port}: {reason}")
    assert problem.endswith("; choose another address")


def test_a_taken_port_is_a_settings_error() -> None:
    with open_socket("listen", "127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsInvalid, match=f"listen: cannot listen on 127.0.0.1:{port}"):
            open_socket("listen", "127.0.0.1", port)


def test_an_application_is_served_until_stop(runner: asyncio.Runner) -> None:
    async def serve() -> tuple[str, int]:
        server = AsgiServer(Application(), open_socket("listen", "127.0.0.1", 0))
        server.start()
        port = server.port
        answer = await asyncio.to_thread(get, port)
        await server.stop()
        return answer, port

    answer, port = runner.run(serve())
    assert answer == "there"
    with pytest.raises(requests.ConnectionError):
        get(port)


POST = b"POST / HTTP/1.1\r\nHost: agent\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"


def send_without_end(port: int, first: bytes, again: bytes) -> None:
    """Send `first`, then `again` until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), WITHIN_S) as connection:
        connection.sendall(first)
        for _ in range(100_000):
            connection.sendall(again)


@pytest.mark.parametrize(
    ("first", "again"),
    [
        pytest.param(b"GET /", b"x" * 1000, id="address"),
        pytest.param(POST + b"x-long: ", b"x" * 1000, id="header"),
        pytest.param(POST, b"x-many: " + b"x" * 990 + b"\r\n", id="headers"),
        pytest.param(CHUNKED + b"0\r\nx-long: ", b"x" * 1000, id="trailer"),
        pytest.param(CHUNKED + b"1;x=", b"x" * 1000, id="chunk extension"),
    ],
)
def test_an_endless_head_is_refused(runner: asyncio.Runner, first: bytes, again: bytes) -> None:
    async def serve() -> None:
        server = AsgiServer(Application(), open_socket("listen", "127.0.0.1", 0))
        server.start()
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(send_without_end, server.port, first, again)
        assert await asyncio.to_thread(get, server.port) == "there"
        await server.stop()

    runner.run(serve())


def test_a_long_head_and_a_longer_body_pass(runner: asyncio.Runner) -> None:
    async def serve() -> str:
        server = AsgiServer(Application(), open_socket("listen", "127.0.0.1", 0))
        server.start()
        url = f"http://127.0.0.1:{server.port}/"
        answer = await asyncio.to_thread(
            requests.post,
            url,
            iter([bytes(100_000)] * 10),
            headers={"Cookie": "x" * 50_000},
            timeout=WITHIN_S,
        )
        await server.stop()
        return answer.text

    assert runner.run(serve()) == "there"


def test_stop_lets_open_requests_end(runner: asyncio.Runner) -> None:
    async def serve() -> str:
        application = Application()
        server = AsgiServer(application, open_socket("listen", "127.0.0.1", 0))
        server.start()
        with ThreadPoolExecutor() as threads:
            loop = asyncio.get_running_loop()
            answer = loop.run_in_executor(threads, get, server.port, "/slow")
            await asyncio.to_thread(application.received.wait, WITHIN_S)
            stopping = asyncio.create_task(server.stop())
            await asyncio.sleep(0)
            assert not stopping.done()
            application.go_on.set()
            await stopping
            return await answer

    assert runner.run(serve()) == "there"


@pytest.mark.parametrize("ends", [True, False])
def test_a_wait_for_open_requests_can_be_given_up_for_a_shorter_one(
    runner: asyncio.Runner, ends: bool
) -> None:
    async def work() -> None:
        application = Application()
        server = AsgiServer(application, open_socket("listen", "127.0.0.1", 0))
        server.start()
        with ThreadPoolExecutor() as pool:
            text = pool.submit(get, server.port, "/slow")
            await asyncio.to_thread(application.received.wait, WITHIN_S)
            endless = asyncio.create_task(server.stop(within_s=None))
            await asyncio.wait({endless}, timeout=0.2)
            endless.cancel()
            if ends:
                application.go_on.set()
            await server.stop(within_s=5 if ends else 0)
            assert endless.cancelled()
            if ends:
                assert (await asyncio.wrap_future(text)) == "there"
            else:
                application.go_on.set()

    runner.run(work())


def test_a_stop_cuts_off_the_clients_that_are_left(
    runner: asyncio.Runner, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> bytes:
        application = Application()
        server = AsgiServer(application, open_socket("listen", "127.0.0.1", 0))
        server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /slow HTTP/1.1\r\nHost: agent\r\n\r\n")
        await asyncio.to_thread(application.received.wait, WITHIN_S)
        await server.stop(within_s=0.1)
        with contextlib.closing(writer), contextlib.suppress(ConnectionResetError):
            return await reader.read()
        return b""

    assert runner.run(work()) == b""
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == [
        "listen: 1 clients were cut off after 0.1 s"
    ]


def test_the_limits_hold_for_clients_that_a_stop_waits_for(runner: asyncio.Runner) -> None:
    async def work() -> None:
        application, cut = Application(), asyncio.Event()
        limits = ClientLimits(body_s=0.1)
        clients = SocketClients("listen", limits, on_cut=lambda *_: cut.set())
        server = AsgiServer(application, open_socket("listen", "127.0.0.1", 0), clients)
        server.start()
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(POST + b"Content-Length: 9\r\n\r\n")
        await asyncio.to_thread(application.received.wait, WITHIN_S)
        async with asyncio.timeout(WITHIN_S):
            await server.stop(within_s=None)
        writer.close()
        assert cut.is_set()

    runner.run(work())


def test_a_server_that_never_started_can_be_stopped(runner: asyncio.Runner) -> None:
    with open_socket("listen", "127.0.0.1", 0) as listening:
        runner.run(AsgiServer(Application(), listening).stop())


def test_no_signal_handler_is_installed(runner: asyncio.Runner) -> None:

    async def serve() -> object:
        server = AsgiServer(Application(), open_socket("listen", "127.0.0.1", 0))
        server.start()
        await asyncio.to_thread(get, server.port)
        handler = signal.getsignal(signal.SIGTERM)
        await server.stop()
        return handler

    before = signal.getsignal(signal.SIGTERM)
    assert runner.run(serve()) is before
