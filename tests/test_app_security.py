"""Attacks on the ports of the running agent."""

import os
import ssl
import stat
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import psutil
import psycopg
import pytest
import requests
import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from tests.real_parts.agent_process import (
    AgentOfUser,
    AgentPorts,
    AgentProcess,
    HastyAgent,
)
from tests.real_parts.certificates import Certificate, make_certificate
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.processes import ServerProcess
from tests.real_parts.span_sender import SpanSender, request_span
from tests.real_parts.waiting import eventually
from tests.sources.engines.wire import EngineServer

pytestmark = pytest.mark.slow

WITHIN_S = 60.0

# More than there are threads, and twice as many as there are connections.
CLIENTS = 45


@dataclass(frozen=True, slots=True)
class Asked:
    """A response, and how many responses there were when it was asked for."""

    after: int
    response: requests.Response


@contextmanager
def asking(url: str) -> Iterator[list[Asked]]:
    """Many clients that query a path without end."""
    responses: list[Asked] = []
    done = Event()

    def ask() -> None:
        while not done.is_set():
            after = len(responses)
            responses.append(Asked(after, requests.get(url, timeout=WITHIN_S)))

    with ThreadPoolExecutor(CLIENTS) as clients:
        asked = [clients.submit(ask) for _ in range(CLIENTS)]
        try:
            yield responses
        finally:
            done.set()
            for each in asked:
                each.result()


def test_queries_that_wait_for_a_lock_are_refused_and_keep_nobody_else_waiting(
    tmp_path: Path, postgres_url: str
) -> None:
    ports = AgentPorts.free()
    upgrade(engine := open_engine(postgres_url))
    engine.dispose()
    settings = {
        "engines": [{"name": "chat-0", "url": f"http://127.0.0.1:{free_port()}"}],
        "storage": {"publish_to": postgres_url, "query_timeout": "2s"},
    }
    with (
        AgentProcess.with_settings(tmp_path, ports, settings) as agent,
        psycopg.connect(postgres_url.replace("+psycopg", "")) as database,
        asking(f"{agent.url}/api/v1/summary") as responses,
    ):
        database.execute("LOCK TABLE rollups IN ACCESS EXCLUSIVE MODE")
        locked_at = len(responses)

        def refused() -> list[requests.Response]:
            # A query without a connection is answered from the agent's file.
            later = [each.response for each in responses if each.after > locked_at]
            return [response for response in later if not response.ok]

        def sentences() -> set[str]:
            return {response.json()["detail"] for response in refused()}

        def time_out_is_named() -> bool:
            return any("storage.query_timeout" in sentence for sentence in sentences())

        # Every thread and connection of queries is waiting now.
        eventually(time_out_is_named, within_s=WITHIN_S, what="a refusal that names the time-out")
        assert "llm_agent_info" in agent.api.exposition()
        assert SpanSender(ports.grpc).export([request_span("while queries wait")])
        found, status = sentences(), {response.status_code for response in refused()}
        database.rollback()
        eventually(lambda: responses[-1].response.ok, within_s=WITHIN_S, what="figures")
    assert status == {503}
    assert not any("127.0.0.1" in sentence for sentence in found)


def shared_database(agent: str) -> str:
    """What /readyz says of the shared database."""
    body = requests.get(f"{agent}/readyz", timeout=WITHIN_S).json()
    return str(body["parts"]["shared database"])


@contextmanager
def without_umask() -> Iterator[None]:
    """As a service manager may start a program: new files are open to everybody."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def test_responses_show_nothing_of_the_database_and_files_are_for_the_agents_user_alone(
    tmp_path: Path,
) -> None:
    ports, port = AgentPorts.free(), free_port()
    secrets = {"user": "secret-user", "password": "secret-word", "database": "secret-database"}
    url = "postgresql://{user}:{password}@127.0.0.1:{port}/{database}".format(port=port, **secrets)
    settings = {
        "storage": {"publish_to": url},
        "engines": [{"name": "chat-0", "url": f"http://127.0.0.1:{free_port()}"}],
    }
    agent = AgentOfUser.with_settings(tmp_path, ports, settings)
    with without_umask():
        agent.start()
    try:
        eventually(
            lambda: "rows wait" in shared_database(agent.url),
            within_s=WITHIN_S,
            what="the problem of the shared database",
        )
        paths = ("/readyz", "/api/v1/summary", "/api/v1/requests", "/api/v1/objectives")
        responses = [requests.get(f"{agent.url}{path}", timeout=WITHIN_S) for path in paths]
        assert SpanSender(ports.grpc).export([request_span("one")])
        files = [file for file in tmp_path.iterdir() if ".db" in file.name]
        modes = {file.name: oct(stat.S_IMODE(file.stat().st_mode)) for file in files}
    finally:
        agent.stop()
    for response in responses:
        assert response.status_code == 200
        assert not [word for word in (*secrets.values(), str(port)) if word in response.text]
    assert str(port) in agent.log()
    assert secrets["password"] not in agent.log()
    assert modes.keys() >= {"goodput.db", "goodput.db.lock", "goodput.db-shm"}
    assert set(modes.values()) == {"0o600"}, modes


# Invented names

NAMES = 500
MOST_SERIES = 20


def test_invented_models_do_not_make_figures_grow(tmp_path: Path) -> None:
    ports = AgentPorts.free()
    settings = {
        "engines": [{"name": "chat-0", "url": f"http://127.0.0.1:{free_port()}"}],
        "storage": {"max_series": MOST_SERIES},
    }
    with HastyAgent.with_settings(tmp_path, ports, settings) as agent:
        spans = [request_span(f"request-{number}") for number in range(NAMES)]
        for number, span in enumerate(spans):
            name = AnyValue(string_value=f"invented-{number}")
            span.attributes.append(KeyValue(key="gen_ai.request.model", value=name))
        assert SpanSender(ports.grpc).export(spans)

        def folded() -> list[dict[str, Any]]:
            groups = agent.api.breakdown(by="model", window="1h", limit="1000")["groups"]
            return groups if len(groups) <= MOST_SERIES + 1 else []

        def all_counted() -> bool:
            exposition = agent.api.exposition()
            counted = total(exposition, "llm_agent_labels_replaced_total", label="series")
            return counted == NAMES - MOST_SERIES

        found = eventually(folded, within_s=2 * WITHIN_S, what="folding")
        groups = {group["group"]: group["requests"] for group in found}
        assert groups["other"] == NAMES - MOST_SERIES
        assert sum(groups.values()) == agent.api.summary(window="1h")["requests"] == NAMES
        eventually(all_counted, within_s=WITHIN_S, what="the names that were replaced")
        # Rows keep what the sender wrote.
        assert agent.api.request("request-499")["model"] == "invented-499"
        assert "storage.max_series" in agent.log()


# Tokens and TLS

READ, INGEST, NEWER = "token-for-reading-1", "token-for-spans-1", "token-for-reading-2"


@dataclass(frozen=True, slots=True)
class Locked:
    """An agent on all addresses of this machine, with tokens and TLS, before an engine."""

    ports: AgentPorts
    proxy_port: int
    folder: Path
    used: Certificate
    other: Certificate
    engine: EngineServer
    process: ServerProcess

    def children(self) -> list[psutil.Process]:
        """The processes under its supervisor."""
        return psutil.Process(self.process.pid).children()

    def get(
        self, path: str, token: str | None = None, trusted: Path | None = None
    ) -> requests.Response:
        """The response of the API; the connection is a new one."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        url = f"https://127.0.0.1:{self.ports.listen}{path}"
        verify = str(trusted or self.used.certificate)
        return requests.get(url, headers=headers, verify=verify, timeout=WITHIN_S)

    def export(self, name: str, token: str | None) -> tuple[int, grpc.StatusCode]:
        """How an export over HTTP and one over gRPC end."""
        export = ExportTraceServiceRequest()
        export.resource_spans.add().scope_spans.add().spans.append(request_span(name))
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        answer = requests.post(
            f"https://127.0.0.1:{self.ports.http}/v1/traces",
            export.SerializeToString(),
            headers={"Content-Type": "application/x-protobuf", **headers},
            verify=str(self.used.certificate),
            timeout=WITHIN_S,
        )
        trusted = grpc.ssl_channel_credentials(self.used.certificate.read_bytes())
        with grpc.secure_channel(f"127.0.0.1:{self.ports.grpc}", trusted) as channel:
            stub = TraceServiceStub(channel)  # type: ignore[no-untyped-call]
            try:
                stub.Export(export, timeout=WITHIN_S, metadata=tuple(headers.items()))
            except grpc.RpcError as error:
                return answer.status_code, error.code()
        return answer.status_code, grpc.StatusCode.OK


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    folder, ports, proxy_port = tmp_path_factory.mktemp("locked"), AgentPorts.free(), free_port()
    used, other = make_certificate(folder, "used"), make_certificate(folder, "other")
    (folder / "read").write_text(READ)
    (folder / "ingest").write_text(INGEST)
    with EngineServer() as engine:
        engine.answers("/v1/completions", b"")
        settings = {
            "listen": {"host": "0.0.0.0", "port": ports.listen},
            "otlp": {"grpc": f"0.0.0.0:{ports.grpc}", "http": f"0.0.0.0:{ports.http}"},
            "proxy": {"listen": f"0.0.0.0:{proxy_port}"},
            "storage": {"file": str(folder / "goodput.db")},
            "engines": [{"name": "chat-0", "url": engine.url}],
            "security": {
                "read_tokens": str(folder / "read"),
                "ingest_tokens": str(folder / "ingest"),
                "tls_certificate": str(used.certificate),
                "tls_key": str(used.key),
            },
        }
        (folder / "agent.yml").write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "agent", "run", "--config", str(folder / "agent.yml")]
        process = ServerProcess(command, folder / "agent.log")
        found = Locked(ports, proxy_port, folder, used, other, engine, process)
        try:
            process.wait_until(lambda: _is_ready(found), within_s=WITHIN_S)
            yield found
            assert process.stop() == 0
        finally:
            process.kill()
        assert "Traceback" not in (folder / "agent.log").read_text()


def _is_ready(locked: Locked) -> bool:
    try:
        return locked.get("/readyz").status_code == 200
    except requests.ConnectionError:
        return False


def _shown(port: int) -> str:
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=WITHIN_S).strip()


def test_figures_are_for_holders_of_a_read_token(locked: Locked) -> None:
    for path in ("/api/v1/summary", "/api/v1/requests", "/metrics"):
        for token in (None, INGEST, READ[:-1]):
            assert locked.get(path, token).status_code == 401
        assert locked.get(path, READ).status_code == 200
    for path in ("/healthz", "/readyz", "/", "/docs"):
        assert locked.get(path).status_code == 200


def test_spans_are_taken_from_holders_of_an_ingest_token(locked: Locked) -> None:
    refused = (401, grpc.StatusCode.UNAUTHENTICATED)
    for token in (None, READ, f"{INGEST}x"):
        assert locked.export("refused", token) == refused
    assert locked.export("taken", INGEST) == (200, grpc.StatusCode.OK)
    assert locked.get("/api/v1/requests/taken", READ).status_code == 200
    assert locked.get("/api/v1/requests/refused", READ).status_code == 404
    metrics = locked.get("/metrics", READ).text
    assert 'llm_agent_exports_refused_total{reason="token"} 6.0' in metrics


def test_the_proxy_passes_on_the_clients_own_authorization(locked: Locked) -> None:
    for given in ("Bearer the clients own key", None):
        answer = requests.post(
            f"https://127.0.0.1:{locked.proxy_port}/v1/completions",
            data=b"{}",
            headers={} if given is None else {"Authorization": given},
            verify=str(locked.used.certificate),
            timeout=WITHIN_S,
        )
        assert answer.status_code == 200
        headers, _ = locked.engine.posted[-1]
        assert {name.lower(): value for name, value in headers.items()}.get(
            "authorization"
        ) == given


def test_tokens_and_the_certificate_are_replaced_while_the_agent_runs(locked: Locked) -> None:
    for new, old in ((NEWER, READ), (READ, NEWER)):
        (locked.folder / "read").write_text(new)
        eventually(
            lambda token=new: locked.get("/metrics", token).status_code == 200,  # type: ignore[misc]
            within_s=WITHIN_S,
            what="the new token",
        )
        assert locked.get("/metrics", old).status_code == 401
    before = locked.folder / "before.crt"
    before.write_bytes(locked.used.certificate.read_bytes())
    locked.used.replace_by(locked.other)
    expected = locked.other.certificate.read_text().strip()
    eventually(
        lambda: _shown(locked.ports.listen) == expected,
        within_s=WITHIN_S,
        what="the new certificate",
    )
    assert locked.get("/healthz").status_code == 200
    assert locked.export("after", INGEST) == (200, grpc.StatusCode.OK)
    with pytest.raises(requests.exceptions.SSLError):
        locked.get("/healthz", trusted=before)


def test_a_worker_is_started_again_while_the_tls_files_are_no_certificate(locked: Locked) -> None:
    key = locked.used.key.read_bytes()
    locked.used.key.write_text("no key")
    (worker,) = (child for child in locked.children() if child.name() == "proxy worker 0")
    worker.kill()
    eventually(lambda: not worker.is_running(), within_s=WITHIN_S, what="its end")
    shown = ssl.get_server_certificate(("127.0.0.1", locked.proxy_port), timeout=WITHIN_S)
    locked.used.key.write_bytes(key)
    assert shown.startswith("-----BEGIN CERTIFICATE")


def test_an_open_address_without_a_token_does_not_start(tmp_path: Path) -> None:
    opened = {"GOODPUT_LISTEN__HOST": "0.0.0.0", "GOODPUT_OTLP__GRPC": "0.0.0.0:4317"}
    command = [sys.executable, "-m", "agent", "run", "--engine", "http://127.0.0.1:9"]
    process = ServerProcess(command, log := tmp_path / "log", environment=opened)
    assert process.wait(within_s=WITHIN_S) == 2
    (line,) = log.read_text().splitlines()
    for part in ("listen.host 0.0.0.0", "otlp.grpc 0.0.0.0", "--insecure"):
        assert part in line


def test_insecure_opens_all_ports_but_not_to_pages_of_other_sites_and_open_files_are_named(
    tmp_path: Path,
) -> None:
    ports = AgentPorts.free()
    environment = {
        "GOODPUT_LISTEN__HOST": "0.0.0.0",
        "GOODPUT_LISTEN__PORT": str(ports.listen),
        "GOODPUT_OTLP__GRPC": "null",
        "GOODPUT_OTLP__HTTP": f"0.0.0.0:{ports.http}",
        "GOODPUT_STORAGE__FILE": str(tmp_path / "goodput.db"),
    }
    arguments = ["run", "--engine", f"http://127.0.0.1:{free_port()}", "--insecure"]
    agent = AgentProcess(arguments, tmp_path, ports.listen, environment)
    database = tmp_path / "goodput.db"
    database.chmod(0o640)
    with agent:
        assert agent.api.requests() == []
        rebound = {"Host": f"evil.example:{ports.listen}"}
        for url in (agent.url, f"http://127.0.0.1:{ports.http}/v1/traces"):
            refused = requests.post(url, headers=rebound, json={}, timeout=WITHIN_S)
            assert refused.status_code == 421
        refused = requests.get(f"{agent.url}/metrics", headers=rebound, timeout=WITHIN_S)
        assert refused.status_code == 421
        assert "llm_" not in refused.text
    assert f"other users of this machine may open {database}; `chmod 600" in agent.log()
    assert stat.S_IMODE(database.stat().st_mode) == 0o640
