"""Connections ignore ~/.netrc and proxies of the environment, and follow no redirect."""

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import make_url
from typer.testing import CliRunner

from agent.agent_api import open_agent
from agent.app.past import SimulatedGpus
from agent.cli import main
from agent.errors import AgentError
from agent.http_client import http_session
from agent.outputs.otlp_forwarder import HttpDestination, destination
from agent.simulator.batching import Batch
from agent.simulator.span_sender import SpanProtocol, SpanSender, SpanTarget
from agent.sources.dcgm.source import DcgmSource
from agent.sources.engines.live_engine import LiveEngine
from agent.sources.kubernetes import ApiServer
from agent.store.clickhouse.connecting import open_clickhouse
from tests.outputs.otlp_destinations import Body, grpc_destination
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.recording_server import Recorded, recording_server
from tests.real_parts.waiting import eventually
from tests.simulator.kit import PLAIN, engine_request, steps

TOKEN = "the-token-of-the-file"
BEARER = f"Bearer {TOKEN}"
NETRC = "machine 127.0.0.1 login someone password of-netrc\nmachine localhost login a password b\n"
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "GRPC_PROXY")
WITHIN_S = 30.0
AGENT = Path(__file__).parents[1] / "agent"
OPENED = re.compile(
    r"\brequests\.(Session\(|get\(|post\(|request\()|urllib\.request|trust_env=True"
)


@pytest.fixture
def server() -> Iterator[Recorded]:
    with recording_server() as recorded:
        yield recorded


@pytest.fixture
def proxy() -> Iterator[Recorded]:
    with recording_server() as recorded:
        yield recorded


@pytest.fixture
def environment(tmp_path: Path, proxy: Recorded) -> Mapping[str, str]:
    """A home with a .netrc, and proxies in both spellings."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".netrc").write_text(NETRC)
    (home / ".netrc").chmod(0o600)
    names = [spelled for name in PROXIES for spelled in (name, name.lower())]
    return {"HOME": str(home), "NO_PROXY": "", "no_proxy": "", **dict.fromkeys(names, proxy.url)}


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    return file


def audit(url: str, token_file: Path) -> None:
    options = (url, "--key-file", str(token_file), "--agent", url)
    CliRunner().invoke(main, ["audit", *options, "--token-file", str(token_file)])


def audit_part(url: str, _: Path) -> None:
    live = LiveEngine(url, key=TOKEN)
    with suppress(AgentError):
        live.read()
    live.send("model")
    live.close()


def report(url: str, token_file: Path) -> None:
    CliRunner().invoke(main, ["report", "--url", url, "--token-file", str(token_file)])


def gpus_of_dcgm(url: str, _: Path) -> None:
    DcgmSource(url=url).read(0.0)


def pods(url: str, token_file: Path) -> None:
    with suppress(AgentError):
        ApiServer(url, token_file.parent).list("/api/v1/pods", {})


def export(url: str, _: Path) -> None:
    to = HttpDestination(url, headers={"Authorization": BEARER})
    to.send(Body(b"x"))
    to.close()


def spans_of_a_simulator(url: str, _: Path) -> None:
    send_span(f"{url}/v1/traces", SpanProtocol.HTTP)


def send_span(endpoint: str, protocol: SpanProtocol) -> None:
    sender = SpanSender(SpanTarget(endpoint=endpoint, protocol=protocol), lambda _: 0)
    for step in steps(Batch(PLAIN, [engine_request()])):
        sender.observe(step)
    asyncio.run(sender.close())


def simulated_gpus(url: str, _: Path) -> None:
    SimulatedGpus([url]).read(0.0)


def clickhouse(url: str, _: Path) -> None:
    address = make_url(url.replace("http:", "clickhousedb:")).set(username="u", password="p")
    with suppress(Exception):
        open_clickhouse(address, statement_s=1.0).connect()


CLIENTS: list[tuple[Callable[[str, Path], None], set[str | None]]] = [
    (audit, {BEARER, None}),
    (audit_part, {BEARER, None}),
    (report, {BEARER}),
    (gpus_of_dcgm, {None}),
    (pods, {BEARER}),
    (export, {BEARER}),
    (spans_of_a_simulator, {None}),
    (simulated_gpus, {None}),
    (clickhouse, {"Basic dTpw"}),
]


@pytest.mark.parametrize(
    ("client", "passwords"), CLIENTS, ids=[client.__name__ for client, _ in CLIENTS]
)
def test_a_client_sends_its_own_password_to_its_own_server_alone(
    client: Callable[[str, Path], None],
    passwords: set[str | None],
    environment: Mapping[str, str],
    server: Recorded,
    proxy: Recorded,
    token_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (token_file.parent / "ca.crt").touch()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    client(server.url, token_file)
    assert server.passwords == passwords
    assert proxy.requests == []


def test_grpc_takes_no_proxy_of_the_environment(
    environment: Mapping[str, str], proxy: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with grpc_destination() as to:
        forwarding = destination(to.url)
        assert forwarding.send(Body(b"x")).refused is None
        forwarding.close()
        send_span(to.url.removeprefix("grpc://"), SpanProtocol.GRPC)
    assert len(to.received) == 2
    assert proxy.requests == []


def test_exports_go_through_the_proxy_of_the_settings(proxy: Recorded) -> None:
    for url in ("http://collector.invalid:4318", "grpc://collector.invalid:4317"):
        to = destination(url, proxy.url)
        to.send(Body(b"x"))
        to.close()
    asked = [request for request, _ in proxy.requests]
    assert asked[0] == "POST http://collector.invalid:4318/v1/traces"
    assert set(asked[1:]) == {"CONNECT collector.invalid:4317"}


def test_a_redirect_gets_nothing(server: Recorded, proxy: Recorded, token_file: Path) -> None:
    server.redirects_to = proxy.url
    with (
        open_agent(server.url, token_file, None) as agent,
        pytest.raises(AgentError, match=f"redirects to {proxy.url}; give that URL"),
    ):
        agent.read("/readyz")
    with http_session() as session:
        assert session.post(server.url, data=b"x").status_code == 307
    clickhouse(server.url, token_file)
    assert "Basic dTpw" in server.passwords
    assert proxy.requests == []


@pytest.mark.slow
def test_a_running_agent_takes_the_proxy_of_its_settings_and_nothing_of_its_environment(
    tmp_path: Path, environment: Mapping[str, str], server: Recorded, proxy: Recorded
) -> None:
    with recording_server() as chosen:
        settings = {
            "engines": [{"name": "chat-0", "url": server.url, "scrape_interval": "1s"}],
            "dcgm": {"url": server.url},
            "otlp_metrics": {
                "endpoint": "http://collector.invalid:4318",
                "headers": {"Authorization": BEARER},
                "interval": "1s",
            },
            "http_proxy": chosen.url,
        }
        ports = AgentPorts.free()
        with AgentProcess.with_settings(tmp_path, ports, settings, environment):
            eventually(lambda: bool(chosen.requests), within_s=WITHIN_S, what="a push of metrics")
            eventually(lambda: bool(server.requests), within_s=WITHIN_S, what="a scrape")
    pushed = {asked for asked, _ in chosen.requests}
    assert pushed == {"POST http://collector.invalid:4318/v1/metrics"}
    assert (chosen.passwords, server.passwords) == ({BEARER}, {None})
    assert proxy.requests == []


def test_every_session_of_the_agent_is_made_by_this_module() -> None:
    others = [
        str(path.relative_to(AGENT))
        for path in AGENT.rglob("*.py")
        if path.name != "http_client.py" and OPENED.search(path.read_text(encoding="utf-8"))
    ]
    assert others == []
