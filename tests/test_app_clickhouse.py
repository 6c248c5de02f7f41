"""Running agents that publish to ClickHouse, and `serve` beside them.

The engine is ClickHouse's own, from chDB; the HTTP in front of it is of the tests.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
import yaml

from agent.app.serving import DatabaseServer
from agent.errors import StoreUnavailable
from agent.settings import load
from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.clickhouse import ClickHouseServer
from tests.real_parts.ports import free_port
from tests.real_parts.span_sender import SpanSender, request_span
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.slow

WITHIN_S = 120.0
SPANS = 20


class Fleet(NamedTuple):
    """An agent, its sender of spans, `serve`, and the database of both."""

    agent: AgentProcess
    sender: SpanSender
    server: AgentProcess
    database: ClickHouseServer


def settings(folder: Path, url: str) -> dict[str, Any]:
    return {
        "name": "agent-0",
        "engines": [{"name": "chat-0", "url": f"http://127.0.0.1:{free_port()}"}],
        "storage": {"publish_to": url},
    }


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder, ports = tmp_path_factory.mktemp("fleet"), AgentPorts.free()
    (folder / "clickhouse").mkdir()
    database = ClickHouseServer(folder / "clickhouse")
    database.execute("CREATE DATABASE goodput")
    url, port = database.url("goodput"), free_port()
    upgrade(opened := open_engine(url))
    opened.dispose()
    config = folder / "serve.yml"
    config.write_text(yaml.safe_dump({"listen": {"port": port}, "storage": {"publish_to": url}}))
    with (
        AgentProcess.with_settings(folder, ports, settings(folder, url)) as agent,
        AgentProcess(["serve", "--config", config], folder, port) as server,
    ):
        yield Fleet(agent, SpanSender(ports.grpc), server, database)
    database.stop()


def test_what_is_acknowledged_is_served_from_clickhouse(fleet: Fleet) -> None:
    assert fleet.sender.export([request_span(f"r-{n}") for n in range(SPANS)])
    eventually(
        lambda: fleet.server.api.summary(window="1h")["requests"] == len(fleet.sender.acknowledged),
        within_s=WITHIN_S,
        what="the published requests",
    )
    rows = fleet.server.api.requests(agent="agent-0")
    assert {row["trace_id"] for row in rows} == fleet.sender.acknowledged
    groups = fleet.server.api.breakdown(window="1h", by="agent")["groups"]
    assert [(each["group"], each["requests"]) for each in groups] == [
        ("agent-0", len(fleet.sender.acknowledged))
    ]
    (agent,) = fleet.server.api.items("/api/v1/agents", {})
    assert (agent["name"], agent["overdue"]) == ("agent-0", False)
    # The agent itself answers from there, too.
    own = fleet.agent.api.summary(window="1h")
    assert own["requests"] == len(fleet.sender.acknowledged)


def test_an_agent_goes_on_while_clickhouse_is_away(fleet: Fleet) -> None:
    def part() -> str:
        response = requests.get(f"{fleet.agent.url}/readyz", timeout=WITHIN_S)
        assert response.status_code == 200, response.text
        said: str = response.json()["parts"]["shared database"]
        return said

    fleet.database.kill()
    assert fleet.sender.export([request_span(f"late-{n}") for n in range(SPANS)])
    eventually(lambda: "rows wait" in part(), within_s=WITHIN_S, what="the reason")
    assert fleet.agent.api.summary(window="1h")["requests"] == len(fleet.sender.acknowledged)
    eventually(
        lambda: requests.get(f"{fleet.server.url}/readyz", timeout=WITHIN_S).status_code == 503,
        within_s=WITHIN_S,
        what="that serve is not ready",
    )
    fleet.database.restart()
    eventually(
        lambda: fleet.server.api.summary(window="1h")["requests"] == len(fleet.sender.acknowledged),
        within_s=WITHIN_S,
        what="the requests of the meantime",
    )
    rows = fleet.server.api.requests()
    assert sorted(row["trace_id"] for row in rows) == sorted(fleet.sender.acknowledged)


def test_serve_migrates_nothing(clickhouse_url: str) -> None:
    with pytest.raises(StoreUnavailable) as refusal:
        DatabaseServer(load(None, {"GOODPUT_STORAGE__PUBLISH_TO": clickhouse_url}), time.time)
    assert "run `goodput-agent db upgrade`" in str(refusal.value)
