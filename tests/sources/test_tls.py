"""The agent's certificate and its key, replaced while it runs."""

import asyncio
import os
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
import uvloop

from agent.errors import SettingsInvalid
from agent.sources.listening import AsgiServer, open_socket
from agent.sources.tls import TlsFiles
from tests.real_parts.certificates import Certificate, make_certificate

WITHIN_S = 30.0


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


async def answers(port: int, trusted: Certificate) -> bool:
    """Whether a server that has this certificate responds over TLS."""
    context = ssl.create_default_context(cafile=trusted.certificate)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    response = await reader.read()
    writer.close()
    return b"there" in response


def test_new_files_are_used_once_they_are_read_and_broken_ones_are_not(
    used: Certificate,
    certificates: tuple[Certificate, Certificate],
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, other = certificates
    files = TlsFiles(used.certificate, used.key)

    async def now(port: int, trusted: Certificate) -> bool:
        files.refresh()
        return await answers(port, trusted)

    async def scenario(port: int) -> None:
        assert await now(port, one)
        # A key without its certificate yet, as between two writes.
        used.key.write_bytes(other.key.read_bytes())
        assert await now(port, one)
        assert "the former stay" in caplog.text
        used.certificate.write_bytes(other.certificate.read_bytes())
        assert await now(port, other)
        with pytest.raises(ssl.SSLCertVerificationError):
            await now(port, one)
        used.key.unlink()
        assert await now(port, other)

    async def served() -> None:
        server = AsgiServer(
            application,
            open_socket("test", "127.0.0.1", 0),
            ssl_context_factory=lambda *_: files.context(),
        )
        server.start()
        try:
            async with asyncio.timeout(WITHIN_S):
                await scenario(server.port)
        finally:
            await server.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(served())


def test_files_that_cannot_be_used_are_a_problem_of_the_settings(used: Certificate) -> None:
    used.key.write_text("no key")
    with pytest.raises(SettingsInvalid, match=r"security\.tls_certificate: .*used\.key"):
        TlsFiles(used.certificate, used.key)
    with pytest.raises(SettingsInvalid, match="No such file"):
        TlsFiles(used.certificate.with_name("absent"), used.key)


def test_a_pipe_or_a_key_with_a_password_is_no_file_to_wait_for(used: Certificate) -> None:
    used.key.unlink()
    os.mkfifo(used.key)
    with pytest.raises(SettingsInvalid, match=r"used\.key: Is a named pipe; name a regular file"):
        TlsFiles(used.certificate, used.key)
    locked = used.key.with_name("locked.key")
    make = ["openssl", "genrsa", "-aes128", "-passout", "pass:secret", "-out", str(locked), "2048"]
    subprocess.run(make, check=True, capture_output=True)
    with pytest.raises(SettingsInvalid, match=r"security\.tls_certificate: "):
        TlsFiles(used.certificate, locked)
