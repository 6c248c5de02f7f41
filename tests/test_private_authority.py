"""Servers with certificates of a private CA: the setting `tls.ca`."""

import re
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from typer.testing import CliRunner

from agent.cli import main
from agent.errors import EngineUnreachable, SettingsInvalid
from agent.http_client import client_tls
from agent.outputs.otlp_forwarder import destination
from agent.sources.dcgm.source import DcgmSource
from agent.sources.engines.fetch import fetch, open_session
from tests.outputs.otlp_destinations import Body
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.certificates import Certificate, make_certificate
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.waiting import eventually
from tests.sources.engines.fixture_pages import body
from tests.sources.engines.wire import EngineServer

WITHIN_S = 60.0
PAGE = body("vllm-0.32.0")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("authority"), "private")


@pytest.fixture
def engine(certificate: Certificate) -> Iterator[EngineServer]:
    with EngineServer(certificate) as server:
        server.answers("/metrics", PAGE)
        server.answers("/health", b"")
        server.answers("/v1/models", b'{"data": [{"id": "tiny-llama"}]}')
        server.answers("/v1/completions", b"{}", headers=("Content-Type: application/json",))
        server.answers("/v1/traces", b"")
        yield server


def test_a_session_trusts_the_authority_of_the_file_and_nobody_trusts_it_without(
    engine: EngineServer, certificate: Certificate
) -> None:
    with open_session(certificate.certificate) as session:
        assert fetch(session, f"{engine.url}/metrics", timeout_s=WITHIN_S) == PAGE
    with (
        open_session() as session,
        pytest.raises(EngineUnreachable, match="certificate is not accepted"),
    ):
        fetch(session, f"{engine.url}/metrics", timeout_s=WITHIN_S)


def test_the_name_in_a_certificate_counts_as_well(
    engine: EngineServer, certificate: Certificate
) -> None:
    by_name = engine.url.replace("127.0.0.1", "localhost")
    with (
        open_session(certificate.certificate) as session,
        pytest.raises(EngineUnreachable, match="localhost"),
    ):
        fetch(session, f"{by_name}/metrics", timeout_s=WITHIN_S)


def test_the_authorities_of_the_system_are_trusted_as_before(certificate: Certificate) -> None:
    context, usual = client_tls(certificate.certificate), ssl.create_default_context()
    assert context is not None
    assert context.cert_store_stats()["x509_ca"] > usual.cert_store_stats()["x509_ca"]


def test_gpus_and_spans_go_by_way_of_the_same_authority(
    engine: EngineServer, certificate: Certificate
) -> None:
    for ca, refused in ((certificate.certificate, None), (None, "unreachable")):
        sink = destination(engine.url, ca=ca)
        assert sink.send(Body(b"")).refused == refused
        sink.close()
        exporter = DcgmSource(url=engine.url, ca=ca)
        unreachable = "exporter_connection" in exporter.read(0.0).failures
        assert unreachable == (ca is None)
        exporter.close()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "Empty certificate data"),
        (b"no certificate", "does not contain a certificate"),
        (b"\xff", "'ascii' codec"),
        (None, "No such file or directory"),
    ],
)
def test_a_file_without_certificates_is_a_problem_of_the_settings(
    tmp_path: Path, content: bytes | None, why: str
) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsInvalid, match=rf"tls\.ca: .*ca\.pem cannot be used: .*{why}"):
        client_tls(file)


def test_commands_that_read_an_engine_trust_it_too(
    engine: EngineServer, certificate: Certificate
) -> None:
    environment = {
        "GOODPUT_TLS__CA": str(certificate.certificate),
        "GOODPUT_ENGINES": f"[{{name: chat, url: '{engine.url}'}}]",
        "GOODPUT_LISTEN__PORT": str(free_port()),
        "GOODPUT_NVML__ENABLED": "false",
    }
    listed = CliRunner().invoke(main, ["config", "check", "--engines"], env=environment)
    assert "engine chat: vllm, model tiny-llama" in listed.stdout
    audited = CliRunner().invoke(main, ["audit", engine.url], env=environment)
    assert "pass    prefix caching" in audited.stdout


def test_commands_that_read_an_agent_trust_it_too(
    engine: EngineServer, certificate: Certificate
) -> None:
    trusted = {"GOODPUT_TLS__CA": str(certificate.certificate)}
    for environment, said in ((trusted, "Expecting value"), ({}, "certificate is not accepted")):
        report = CliRunner().invoke(main, ["report", "--url", engine.url], env=environment)
        assert said in str(report.exception)


@pytest.mark.slow
def test_the_agent_scrapes_an_engine_of_a_private_authority_and_proxies_to_it(
    tmp_path: Path, engine: EngineServer, certificate: Certificate
) -> None:
    ports, proxy_port = AgentPorts.free(), free_port()
    ca = tmp_path / "ca.pem"
    ca.write_bytes(certificate.certificate.read_bytes())
    settings = {
        "engines": [{"name": "chat-0", "url": engine.url, "scrape_interval": "1s"}],
        "proxy": {"listen": f"127.0.0.1:{proxy_port}"},
        "tls": {"ca": str(ca)},
    }

    def is_up() -> bool:
        return total(agent.api.exposition(), "llm_engine_up") == 1

    def proxied() -> int:
        url, prompt = f"http://127.0.0.1:{proxy_port}/v1/completions", {"model": "tiny-llama"}
        return requests.post(url, json=prompt, timeout=WITHIN_S).status_code

    with AgentProcess.with_settings(tmp_path, ports, settings) as agent:
        eventually(is_up, within_s=WITHIN_S, what="the engine's scrape")
        assert proxied() == 200
        ca.write_text("no certificate")
        agent.send_signal(signal.SIGHUP)
        refusal = re.compile(r"so nothing changes: .*tls\.ca: .* cannot be used")
        eventually(lambda: refusal.search(agent.log()), within_s=WITHIN_S, what="the refusal")
        worker = agent.process("proxy worker 0")
        worker.kill()
        eventually(lambda: not worker.is_running(), within_s=WITHIN_S, what="its end")
        assert proxied() == 200
        assert len(engine.posted) == 2
        ca.write_bytes(certificate.certificate.read_bytes())
