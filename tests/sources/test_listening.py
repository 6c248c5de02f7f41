"""Listening sockets and embedded servers."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import requests

from agent.errors import SettingsInvalid
from agent.sources.client_connection import ClientLimits, SocketClients
from agent.sources.listening import AsgiServer, TlsFiles, open_socket
from tests.real_parts.certificates import Certificate, make_certificate

WITHIN_S = 30.0
POST = b"POST / HTTP/1.1\r\nHost: agent\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"


class Served:
    """An ASGI application on a free port that responds `there`, on /slow only after `go_on`."""

    def __init__(self, clients: SocketClients | None = None) -> None:
        self.received, self.go_on = asyncio.Event(), asyncio.Event()
        self.server = AsgiServer(self, open_socket("listen", "127.0.0.1", 0), clients)
        self.port = self.server.port

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.received.set()
        if scope["path"] == "/slow":
            await self.go_on.wait()
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"there"})

    async def get(self, path: str = "/") -> str:
        """Return the body of a response. Raises requests.ConnectionError without a server."""
        url = f"http://127.0.0.1:{self.port}{path}"
        return (await asyncio.to_thread(requests.get, url, timeout=WITHIN_S)).text

    async def send(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which a request was sent and received."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        await asyncio.wait_for(self.received.wait(), WITHIN_S)
        return reader, writer


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Served]:
    served = Served()
    served.server.start()
    try:
        yield served
    finally:
        await served.server.stop()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_port_zero_takes_a_free_one(host: str) -> None:
    with open_socket("listen", host, 0) as first, open_socket("listen", host, 0) as second:
        port = first.getsockname()[1]
        assert 0 != port != second.getsockname()[1] != 0
        socket.create_connection((host, port), timeout=WITHIN_S).close()


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("no-such-host.invalid", "Name or service not known"),
        ("192.0.2.1", "Cannot assign requested address"),
        ("127.0.0.1", "Address already in use"),
    ],
)
def test_an_unusable_address_is_a_settings_error(host: str, reason: str) -> None:
    with open_socket("listen", "127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsInvalid) as failure:
            open_socket("otlp.http", host, port)
    (problem,) = failure.value.problems
    assert problem.startswith(f"otlp.http: cannot listen on {host}:{port}: {reason}")
    assert problem.endswith("; choose another address")


async def test_an_application_is_served_until_stop_without_signal_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    async with running() as served:
        assert await served.get() == "there"
        assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(requests.ConnectionError):
        await served.get()


@pytest.mark.slow
async def test_a_sender_may_be_idle_for_longer_than_the_five_seconds_of_exporters() -> None:
    get = b"GET / HTTP/1.1\r\nHost: agent\r\n\r\n"
    async with running() as served:
        reader, writer = await served.send(get)
        with contextlib.closing(writer):
            assert b"there" in await reader.readuntil(b"0\r\n\r\n")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 6.0)
            writer.write(get)
            assert b"there" in await reader.readuntil(b"0\r\n\r\n")


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
async def test_an_endless_head_is_refused(first: bytes, again: bytes) -> None:
    async with running() as served:
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(send_without_end, served.port, first, again)
        assert await served.get() == "there"


async def test_a_long_head_and_a_longer_body_pass() -> None:
    async with running() as served:
        response = await asyncio.to_thread(
            requests.post,
            f"http://127.0.0.1:{served.port}/",
            iter([bytes(100_000)] * 10),
            headers={"Cookie": "x" * 50_000},
            timeout=WITHIN_S,
        )
    assert response.text == "there"


@pytest.mark.parametrize("ends", [True, False])
async def test_a_wait_for_open_requests_can_be_given_up_for_a_shorter_one(ends: bool) -> None:
    async with running() as served:
        response = asyncio.create_task(served.get("/slow"))
        await served.received.wait()
        endless = asyncio.create_task(served.server.stop(within_s=None))
        await asyncio.wait({endless}, timeout=0.2)
        endless.cancel()
        if ends:
            served.go_on.set()
        await served.server.stop(within_s=5 if ends else 0)
        assert endless.cancelled()
        if ends:
            assert await response == "there"
        else:
            with pytest.raises(requests.ConnectionError):
                await response


async def test_a_stop_cuts_off_the_clients_that_are_left(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as served:
        reader, writer = await served.send(b"GET /slow HTTP/1.1\r\nHost: agent\r\n\r\n")
        await served.server.stop(within_s=0.1)
        with contextlib.closing(writer), contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    (line,) = [record.message for record in caplog.records if record.levelno > logging.INFO]
    assert line == "listen: 1 clients were cut off after 0.1 s"


async def test_the_limits_hold_for_clients_that_a_stop_waits_for() -> None:
    cut = asyncio.Event()
    served = Served(SocketClients("listen", ClientLimits(body_s=0.1), lambda *_: cut.set()))
    served.server.start()
    _, writer = await served.send(POST + b"Content-Length: 9\r\n\r\n")
    async with asyncio.timeout(WITHIN_S):
        await served.server.stop(within_s=None)
    writer.close()
    assert cut.is_set()


async def test_a_server_that_never_started_can_be_stopped() -> None:
    with open_socket("listen", "127.0.0.1", 0) as listening:
        await AsgiServer(None, listening).stop()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Certificate, Certificate]:
    folder = tmp_path_factory.mktemp("certificates")
    return make_certificate(folder, "one"), make_certificate(folder, "other")


@pytest.fixture
def used(tmp_path: Path, certificates: tuple[Certificate, Certificate]) -> Certificate:
    """The files that a server uses, at first the first certificate."""
    files = Certificate(tmp_path / "used.crt", tmp_path / "used.key")
    files.replace_by(certificates[0])
    return files


async def application(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"there"})


def test_files_that_cannot_be_used_are_a_problem_of_the_settings(used: Certificate) -> None:
    absent, pipe = used.certificate.with_name("absent"), used.key.with_name("pipe.key")
    os.mkfifo(pipe)
    locked, text = used.key.with_name("locked.key"), used.key.with_name("text.key")
    text.write_text("no key")
    make = ["openssl", "genrsa", "-aes128", "-passout", "pass:secret", "-out", str(locked), "2048"]
    subprocess.run(make, check=True, capture_output=True)
    for certificate, key, problem in (
        (used.certificate, text, r"security\.tls_certificate: .*text\.key"),
        (absent, used.key, "No such file"),
        # It is not waited for.
        (used.certificate, pipe, r"pipe\.key: Is a named pipe; name a regular file"),
        # Nobody is asked for its password.
        (used.certificate, locked, r"security\.tls_certificate: "),
    ):
        with pytest.raises(SettingsInvalid, match=problem):
            TlsFiles(certificate, key)
