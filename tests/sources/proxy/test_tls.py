"""Engines behind TLS, with a real certificate made by openssl."""

import ssl
import subprocess
from pathlib import Path

import pytest

from tests.sources.proxy.wire import (
    CHUNKED,
    GET,
    LAST_CHUNK,
    chunk,
    in_loop,
    post,
    responding,
    serving,
)

STREAM = CHUNKED + chunk(b"one") + chunk(b"two") + LAST_CHUNK


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key; beside it a self-signed certificate for 127.0.0.1."""
    file = tmp_path_factory.mktemp("tls") / "engine.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    subject = ["-nodes", "-subj", "/CN=engine", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(file), "-out", str(file.with_suffix(".crt"))]
    subprocess.run([*command, *subject, *files], check=True, capture_output=True)
    return file


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    """The TLS context of the engine."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.with_suffix(".crt"), certificate)
    return context


@in_loop
async def relayed_over_tls(tls: ssl.SSLContext) -> None:
    async with serving(responding(STREAM), tls=tls) as (engine, proxied):
        for _ in range(2):
            message = await proxied.ask(post(b"{}"))
            assert (message.status, message.body, message.complete) == (200, b"onetwo", True)
        assert engine.visits == 1


@in_loop
async def refused_over_tls(tls: ssl.SSLContext) -> None:
    async with serving(responding(STREAM), tls=tls) as (_, proxied):
        message = await proxied.ask(GET)
        assert message.status == 502
        assert b"certificate" in message.body


def test_an_engine_with_a_trusted_certificate_is_relayed(
    tls: ssl.SSLContext, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_suffix(".crt")))
    relayed_over_tls(tls)


def test_an_engine_with_an_untrusted_certificate_gets_no_request(tls: ssl.SSLContext) -> None:
    refused_over_tls(tls)
