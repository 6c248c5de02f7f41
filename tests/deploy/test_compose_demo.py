"""The profile `demo` of docker-compose.yml on a real Prometheus and a real PostgreSQL."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import text

from agent.settings import Settings
from agent.store.connection import open_engine
from tests.deploy.kit import mounted, services
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.postgres import PostgresServer
from tests.real_parts.prometheus import Prometheus
from tests.real_parts.waiting import eventually
from tests.render.dashboards.answering import every_question, unanswered

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WITHIN_S = 240.0
# Of all queries: others need what the demo has not, such as ranks, drafts, offload and pools.
ANSWERED = 0.6


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def scrapes(agent: AgentProcess, token: Path) -> dict[str, Any]:
    """The configuration of Prometheus with its rules, for an agent of this machine, each second."""
    config = read(mounted("prometheus", "/etc/prometheus/prometheus.yml"))
    config["global"] = {
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "evaluation_interval": "1s",
    }
    rules = read(mounted("prometheus", "/etc/prometheus/rules/goodput-agent.yml"))
    for group in rules["groups"]:
        group["interval"] = "1s"
    often = token.with_name("rules.yml")
    often.write_text(yaml.safe_dump(rules), encoding="utf-8")
    config["rule_files"] = [str(often)]
    del config["alerting"]
    job = config["scrape_configs"][0]
    job["static_configs"] = [{"targets": [agent.url.removeprefix("http://")]}]
    job["authorization"] = {"credentials_file": str(token)}
    config["scrape_configs"] = [job]
    return config


@dataclass(frozen=True, slots=True)
class Site:
    """The demo, which publishes to a PostgreSQL, and a Prometheus that scrapes it."""

    agent: AgentProcess
    prometheus: Prometheus
    database: str


@pytest.fixture(scope="module")
def site(
    tmp_path_factory: pytest.TempPathFactory, postgres_server: PostgresServer
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("demo")
    for name in ("read", "ingest"):
        (folder / name).write_text(f"a-token-to-{name}-figures", encoding="utf-8")
    ports = AgentPorts.free()
    with postgres_server.new_database() as database:
        # In place of the addresses and the paths inside of the container.
        environment = {
            "GOODPUT_LISTEN__HOST": "127.0.0.1",
            "GOODPUT_LISTEN__PORT": str(ports.listen),
            "GOODPUT_OTLP__GRPC": f"127.0.0.1:{ports.grpc}",
            "GOODPUT_OTLP__HTTP": f"127.0.0.1:{ports.http}",
            "GOODPUT_OTLP__FORWARD_TO": "null",
            "GOODPUT_SECURITY__READ_TOKENS": str(folder / "read"),
            "GOODPUT_SECURITY__INGEST_TOKENS": str(folder / "ingest"),
            "GOODPUT_STORAGE__FILE": str(folder / "goodput.db"),
            "GOODPUT_STORAGE__PUBLISH_TO": database,
        }
        settings = mounted("demo", "/etc/goodput-agent/settings.yml")
        command = [*services()["demo"]["command"][:-1], str(settings)]
        with (
            AgentProcess(command, folder, ports.listen, environment) as agent,
            Prometheus(folder, scrapes(agent, folder / "read")) as prometheus,
        ):
            yield Site(agent, prometheus, database)


def test_most_panels_have_data_and_each_query_runs(site: Site) -> None:
    questions = every_question(Settings().all_objectives())

    def share() -> float:
        return 1 - len(unanswered(site.prometheus, questions)) / len(questions)

    eventually(lambda: share() >= ANSWERED, within_s=WITHIN_S, what="figures on the dashboards")


def test_every_rule_can_be_evaluated_and_its_objective_pages(site: Site) -> None:
    errors = site.prometheus.rule_errors
    eventually(lambda: "unknown" not in errors().values(), within_s=WITHIN_S, what="every rule")
    assert errors() == {}
    series = 'ALERTS{alertname="LlmWatchdog"}'
    eventually(lambda: site.prometheus.query(series), within_s=WITHIN_S, what="a firing alert")
    # Its objective pages.
    assert site.prometheus.query('llm_slo_configured{objective="chat"} == 1') != []


def test_the_database_that_grafana_reads_has_the_demos_requests(site: Site) -> None:
    engine = open_engine(site.database)

    def past() -> bool:
        with engine.connect() as connection:
            return bool(connection.scalar(text("SELECT count(*) FROM requests")) > 500)

    eventually(past, within_s=WITHIN_S, what="the past in PostgreSQL")
    engine.dispose()
