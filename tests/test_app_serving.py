"""`goodput-agent serve`: the page and the API of all agents, from their database alone."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from sqlalchemy import Engine, create_engine, text

from agent import __version__
from agent.app.serving import DatabaseServer
from agent.errors import AgentError, SettingsInvalid, StoreUnavailable
from agent.settings import load
from agent.store.claim import AgentState, NameClaim
from agent.store.migrating import upgrade
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.ports import free_port
from tests.real_parts.postgres import PostgresServer
from tests.real_parts.span_sender import SpanSender, request_span
from tests.real_parts.waiting import eventually
from tests.settings.reading import storage_variables
from tests.store.making import some, store_in
from tests.store.migrated import migrated_in

WITHIN_S = 120.0
SPANS = 20
pytestmark = pytest.mark.slow

GONE = {"name": "code-0", "up": True, "model": "qwen", "dialect": "vllm"}


def serving(folder: Path, url: str) -> AgentProcess:
    """`serve` on the database at this URL."""
    port, config = free_port(), folder / "serve.yml"
    settings: dict[str, Any] = {"listen": {"port": port}, "storage": {"publish_to": url}}
    config.write_text(yaml.safe_dump(settings))
    return AgentProcess(["serve", "--config", config], folder, port)


def refused(url: str | None) -> AgentError:
    """Why `serve` does not start on the database at this URL."""
    given = {} if url is None else storage_variables(url)
    with pytest.raises((SettingsInvalid, StoreUnavailable)) as refusal:
        DatabaseServer(load(None, given), time.time)
    return refusal.value


def set_revision(engine: Engine, revision: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE alembic_version SET version_num = '{revision}'"))


def test_it_does_not_start_without_a_database_in_its_settings() -> None:
    assert "neither storage.publish_to nor storage.file is set" in str(refused(None))


def test_it_does_not_start_without_a_database_and_makes_none(tmp_path: Path) -> None:
    file = tmp_path / "absent.db"
    said = str(refused(f"sqlite:///{file}"))
    assert "there is no database" in said
    assert "start an agent" in said
    assert not file.exists()


def test_it_does_not_start_on_a_server_that_cannot_be_reached() -> None:
    error = refused(f"postgresql://owner:s3cret@127.0.0.1:{free_port()}/goodput")
    assert isinstance(error, StoreUnavailable)
    assert error.public.startswith("the database does not answer")
    assert "s3cret" not in str(error)


def test_it_migrates_nothing_and_names_the_command_that_does(tmp_path: Path) -> None:
    with migrated_in(tmp_path) as engine:
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM alembic_version"))
        assert "run `goodput-agent db upgrade`" in str(refused(str(engine.url)))
        with engine.connect() as connection:
            found = connection.execute(text("SELECT version_num FROM alembic_version")).all()
    assert found == []


def test_a_database_of_a_newer_version_wants_that_version(tmp_path: Path) -> None:
    with migrated_in(tmp_path) as engine:
        set_revision(engine, "9999")
        assert "start the version that made it, or a newer one" in str(refused(str(engine.url)))


@contextmanager
def reader_of(url: str) -> Iterator[str]:
    """The URL of a role that may only read the database at this URL."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in (
            "CREATE ROLE served LOGIN",
            "ALTER ROLE served SET default_transaction_read_only = on",
            "GRANT SELECT ON ALL TABLES IN SCHEMA public TO served",
        ):
            connection.execute(text(statement))
        yield url.replace("//postgres@", "//served@")
        connection.execute(text("DROP OWNED BY served"))
        connection.execute(text("DROP ROLE served"))
    engine.dispose()


@dataclass
class Fleet:
    """An agent that publishes, its sender, what another agent left, and `serve` beside them."""

    agent: AgentProcess
    sender: SpanSender
    server: AgentProcess
    url: str

    def served(self, path: str, **parameters: str) -> Any:
        """The JSON of a path of `serve`."""
        response = requests.get(f"{self.server.url}{path}", params=parameters, timeout=WITHIN_S)
        return response.json()

    def agents(self) -> dict[str, Any]:
        """The agents by name, as `serve` has them."""
        return {item["name"]: item for item in self.served("/api/v1/agents")["items"]}


def leave(url: str) -> None:
    """Store the requests of an agent that was last seen an hour ago."""
    engine = create_engine(url)
    upgrade(engine)
    at = time.time()
    times = {"started_at": at - 2, "ended_at": at - 1, "received_at": at}
    store_in(engine, some(range(5), agent="gone", model="qwen", **times))
    claim = NameClaim("gone", "elsewhere:1:a", state=AgentState(engines=lambda: [GONE]))
    claim.take(engine)
    claim.beat(engine)
    with engine.begin() as connection:
        connection.execute(text("UPDATE agents SET seen_at = seen_at - interval '1 hour'"))
    engine.dispose()


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, postgres_server: PostgresServer
) -> Iterator[Fleet]:
    """The agent has published what it acknowledged."""
    folder, ports = tmp_path_factory.mktemp("fleet"), AgentPorts.free()
    with postgres_server.new_database() as url:
        leave(url)
        settings = {
            "name": "agent-0",
            "engines": [{"name": "chat-0", "url": f"http://127.0.0.1:{free_port()}"}],
            "storage": {"publish_to": url},
        }
        (served := folder / "served").mkdir()
        with (
            AgentProcess.with_settings(folder, ports, settings) as agent,
            reader_of(url) as reader,
            serving(served, reader) as server,
        ):
            fleet = Fleet(agent, SpanSender(ports.grpc), server, url)
            assert fleet.sender.export([request_span(f"r-{n}") for n in range(SPANS)])
            eventually(
                lambda: server.api.summary(window="1h", agent="agent-0")["requests"] == SPANS,
                within_s=WITHIN_S,
                what="the published requests",
            )
            yield fleet


def test_requests_of_all_agents_are_summed_and_told_apart(fleet: Fleet) -> None:
    assert fleet.server.api.summary(window="1h")["requests"] == SPANS + 5
    groups = fleet.server.api.breakdown(window="1h", by="agent")["groups"]
    assert {each["group"]: each["requests"] for each in groups} == {"agent-0": SPANS, "gone": 5}
    rows = fleet.server.api.requests(agent="agent-0")
    assert {row["trace_id"] for row in rows} == fleet.sender.acknowledged


def test_agents_show_their_version_heartbeat_and_lag(fleet: Fleet) -> None:
    eventually(
        lambda: fleet.agents()["agent-0"]["waiting_rows"] == 0,
        within_s=WITHIN_S,
        what="a beat after everything was published",
    )
    agents = fleet.agents()
    assert agents.keys() == {"agent-0", "gone"}
    assert agents["agent-0"]["version"] == __version__
    assert (agents["agent-0"]["lag_s"], agents["agent-0"]["stopped_at"]) == (0, None)
    assert agents["gone"]["overdue"] is True
    assert "overdue" in fleet.served("/readyz")["parts"]["agents"]


def test_engines_are_those_of_every_agent_and_unknown_without_it(fleet: Fleet) -> None:
    def engines() -> dict[str, Any]:
        return {item["agent"]: item for item in fleet.served("/api/v1/engines")["items"]}

    def told() -> Any:
        own = engines().get("agent-0", {})
        return own if own.get("up") is False else None

    own = eventually(told, within_s=WITHIN_S, what="the agent's engine")
    assert own["name"] == "chat-0"
    assert own["problem"].endswith("/metrics cannot be reached: connection refused")
    gone = engines()["gone"]
    assert (gone["name"], gone["model"], gone["up"]) == ("code-0", "qwen", None)
    assert re.fullmatch(r"its agent was last seen \d{4} s ago", gone["problem"])


def test_a_state_and_a_role_that_only_a_newer_agent_knows_are_shown_as_they_are(
    fleet: Fleet,
) -> None:
    newer = GONE | {"name": "next-0", "role": "encode", "state": "draining", "state_since": 5.0}
    claim = NameClaim("newer", "elsewhere:1:b", state=AgentState(engines=lambda: [newer]))
    engine = create_engine(fleet.url)
    try:
        claim.take(engine)
        claim.beat(engine)
        rows = {each["name"]: each for each in fleet.served("/api/v1/engines")["items"]}
        assert (rows["next-0"]["state"], rows["next-0"]["role"]) == ("draining", "encode")
        assert "newer version" in rows["next-0"]["state_detail"]
        assert {"chat-0", "code-0"} <= rows.keys()
        assert fleet.served("/api/v1/pools") == {"items": [], "next": None}
    finally:
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM agents WHERE name = 'newer'"))
        engine.dispose()


def test_it_has_the_page_of_an_agent_and_no_metrics_of_its_own(fleet: Fleet) -> None:
    page = requests.get(fleet.server.url, timeout=WITHIN_S)
    assert page.headers["Content-Type"].startswith("text/html")
    assert page.text == requests.get(fleet.agent.url, timeout=WITHIN_S).text
    assert all(line.startswith("# ") for line in fleet.server.api.exposition().splitlines())


def test_it_is_ready_while_the_database_answers(
    fleet: Fleet, postgres_server: PostgresServer
) -> None:
    def status() -> int:
        return requests.get(f"{fleet.server.url}/readyz", timeout=WITHIN_S).status_code

    eventually(lambda: status() == 200, within_s=WITHIN_S, what="that it is ready")
    with postgres_server.frozen():
        eventually(lambda: status() == 503, within_s=WITHIN_S, what="that it is not ready")
        (problem,) = fleet.served("/readyz")["problems"]
        assert "database" in problem
        assert fleet.served("/readyz")["parts"]["agents"] == "unknown"
    eventually(lambda: status() == 200, within_s=WITHIN_S, what="that it is ready again")
