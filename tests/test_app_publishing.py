"""The running agent that publishes its file, while the shared database or the file fails."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
import requests

from agent.app.storing import publishing_status, read_from
from agent.catalog.reasons import LostRows
from agent.errors import QueryTooSlow, StoreUnavailable
from agent.store.publishing.changes import Lag
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.postgres import PostgresServer
from tests.real_parts.span_sender import SpanSender, request_span
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.slow

WITHIN_S = 120.0
SPANS = 20


class PublishingAgent:
    """A running agent, its sender of spans, and its shared database."""

    def __init__(self, folder: Path, url: str) -> None:
        ports = AgentPorts.free()
        self.file = folder / "agent.db"
        self.url = url
        engines = [{"name": "chat-0", "url": f"http://127.0.0.1:{free_port()}"}]
        storage = {"publish_to": url, "file": str(self.file)}
        self.agent = AgentProcess.with_settings(
            folder, ports, {"name": "agent-0", "engines": engines, "storage": storage}
        )
        self.sender = SpanSender(ports.grpc)
        self._sent = 0

    def export(self) -> bool:
        """Whether a batch of new spans is acknowledged."""
        first = self._sent
        self._sent += SPANS
        return self.sender.export([request_span(f"r-{n}") for n in range(first, self._sent)])

    def acknowledged(self, batches: int = 1) -> None:
        """Send batches until each is acknowledged, as a sender does when the machine is busy."""
        for _ in range(batches):
            eventually(self.export, within_s=WITHIN_S, what="an acknowledged batch")

    def part(self) -> str:
        """What /readyz says of the shared database; the agent is ready whatever that is."""
        response = requests.get(f"{self.agent.url}/readyz", timeout=10)
        assert response.status_code == 200, response.text
        said: str = response.json()["parts"]["shared database"]
        return said

    def says(self, sentence: str) -> None:
        """Wait until /readyz says this of the shared database."""
        eventually(lambda: sentence in self.part(), within_s=WITHIN_S, what=sentence)

    def shared(self) -> list[str]:
        """The trace ids of the shared database, each as often as it is there."""
        # Tables are made by whoever comes first: the agent, in its own time.
        with (
            suppress(psycopg.errors.UndefinedTable),
            psycopg.connect(self.url.replace("+psycopg", "")) as connection,
        ):
            found = connection.execute("SELECT trace_id FROM requests ORDER BY id").fetchall()
            return [trace_id for (trace_id,) in found]
        return []

    def whole_and_once(self) -> None:
        """Wait until the shared database has every acknowledged request, and each once."""
        wanted = self.sender.acknowledged
        eventually(
            lambda: wanted <= set(self.shared()), within_s=WITHIN_S, what="the published rows"
        )
        found = self.shared()
        assert len(found) == len(set(found))

    def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        lines = self.agent.api.exposition().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


@pytest.fixture
def publishing(tmp_path: Path, postgres_url: str) -> Iterator[PublishingAgent]:
    """A ready agent."""
    made = PublishingAgent(tmp_path, postgres_url)
    with made.agent:
        yield made


def test_no_outage_of_the_shared_database_is_felt_and_nothing_is_lost(
    publishing: PublishingAgent, postgres_server: PostgresServer
) -> None:
    publishing.acknowledged(3)
    publishing.whole_and_once()
    with postgres_server.frozen():
        publishing.acknowledged(3)
    postgres_server.kill()
    try:
        publishing.acknowledged(3)
        said = eventually(
            lambda: (said := publishing.part()) != "ok" and said,
            within_s=WITHIN_S,
            what="the outage on /readyz",
        )
        assert "wait" in str(said)
        assert "127.0.0.1" not in str(said)
        eventually(
            lambda: publishing.metric("llm_agent_unpublished_rows") >= 3 * SPANS,
            within_s=WITHIN_S,
            what="waiting rows",
        )
        # The agent answers about itself meanwhile.
        own = {row["trace_id"] for row in publishing.agent.api.requests(limit="1000")}
        assert own == publishing.sender.acknowledged
        publishing.agent.kill()
        publishing.agent.start()
        publishing.acknowledged(3)
    finally:
        postgres_server.restart()
    publishing.acknowledged(3)
    publishing.whole_and_once()
    assert len(publishing.shared()) == 15 * SPANS
    eventually(lambda: publishing.part() == "ok", within_s=WITHIN_S, what="/readyz without it")
    assert publishing.agent.api.summary(window="1h")["requests"] == 15 * SPANS
    eventually(
        lambda: publishing.metric("llm_agent_unpublished_rows") == 0,
        within_s=WITHIN_S,
        what="nothing that waits",
    )


@contextmanager
def user_of(url: str, name: str) -> Iterator[tuple[str, Callable[[str], object]]]:
    """The URL of a new user who may make tables, and what runs a statement as the owner."""
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as owner:

        def run(statement: str) -> object:
            return owner.execute(statement.encode())

        run(f"CREATE ROLE {name} LOGIN")
        run(f"GRANT ALL ON SCHEMA public TO {name}")
        yield url.replace("//postgres@", f"//{name}@"), run
        run(f"DROP OWNED BY {name}")
        run(f"DROP ROLE {name}")


def test_a_user_who_may_only_read_is_said_and_nothing_is_lost(
    tmp_path: Path, postgres_url: str
) -> None:
    with user_of(postgres_url, "publisher") as (url, as_owner):
        publishing = PublishingAgent(tmp_path, url)
        with publishing.agent:
            publishing.acknowledged(2)
            publishing.whole_and_once()
            writes = "INSERT, UPDATE, DELETE ON requests"
            as_owner(f"REVOKE {writes} FROM publisher")
            publishing.acknowledged(2)
            publishing.says("the agent's user lacks a privilege")
            assert "permission denied for table requests" in publishing.agent.log()
            as_owner(f"GRANT {writes} TO publisher")
            publishing.whole_and_once()
            publishing.agent.kill()
            as_owner("ALTER ROLE publisher SET default_transaction_read_only = on")
            publishing.agent.start()
            publishing.acknowledged(2)
            publishing.says("the database is read-only")
            as_owner("ALTER ROLE publisher RESET default_transaction_read_only")
            publishing.whole_and_once()
            eventually(lambda: publishing.part() == "ok", within_s=WITHIN_S, what="publishing")
            page = publishing.agent.api.exposition()
    assert total(page, "llm_agent_lost_rows_total") == 0


def _damage(file: Path) -> None:
    """Overwrite all pages but the first, as a failing disk does."""
    with closing(sqlite3.connect(file, timeout=30)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = file.stat().st_size
    with file.open("r+b") as content:
        content.seek(4096)
        content.write(b"\xa5" * (size - 4096))


def test_a_file_that_is_damaged_while_it_runs_or_at_the_start_is_set_aside(
    publishing: PublishingAgent, tmp_path: Path
) -> None:
    publishing.acknowledged(3)
    publishing.whole_and_once()
    safe = set(publishing.sender.acknowledged)
    _damage(publishing.file)
    # A page is not missed before it is read.
    eventually(
        lambda: publishing.export() and list(tmp_path.glob("agent.db.corrupt-*")),
        within_s=WITHIN_S,
        what="the file set aside",
    )
    publishing.sender.acknowledged = safe
    publishing.acknowledged(3)
    publishing.whole_and_once()
    assert "is corrupt: it was renamed to" in publishing.agent.log()
    page = publishing.agent.api.exposition()
    assert total(page, "llm_agent_store_failures_total", what="file_set_aside") >= 1
    assert total(page, "llm_agent_lost_rows_total", reason=LostRows.DAMAGED) >= 1
    before = set(tmp_path.glob("agent.db.corrupt-*Z"))
    publishing.agent.kill()
    _damage(publishing.file)
    damaged = publishing.file.read_bytes()
    publishing.agent.start()
    publishing.acknowledged(2)
    publishing.whole_and_once()
    (aside,) = set(tmp_path.glob("agent.db.corrupt-*Z")) - before
    assert aside.read_bytes() == damaged
    page = publishing.agent.api.exposition()
    assert total(page, "llm_agent_store_failures_total", what="file_set_aside") == 1


class OneDatabase:
    """Queries of one database, which fail from some query on."""

    def __init__(self, name: str, *failures: StoreUnavailable) -> None:
        self._name = name
        self._failures = [*failures]

    def first(self) -> str:
        """Which database this is."""
        return f"the first of the {self._name}"

    def second(self) -> str:
        """Which database this is, unless it fails."""
        for failure in self._failures:
            raise failure
        return f"the second of the {self._name}"


def both(queries: Any) -> list[str]:
    return [queries.first(), queries.second()]


def test_a_response_is_of_one_database_if_the_shared_one_goes_away_meanwhile() -> None:
    shared: Any = OneDatabase("shared one", StoreUnavailable("it went away"))
    own: Any = OneDatabase("file")
    assert read_from(both, shared, own) == ["the first of the file", "the second of the file"]


def test_a_query_that_is_too_slow_for_the_shared_database_is_refused() -> None:
    shared: Any = OneDatabase("shared one", QueryTooSlow())
    own: Any = OneDatabase("file")
    with pytest.raises(QueryTooSlow):
        read_from(both, shared, own)


def test_what_keeps_rows_from_the_shared_database_is_said() -> None:
    assert publishing_status("it is away", Lag(7, 2.5)) == "it is away; 7 rows wait"


def test_a_shared_database_that_falls_behind_is_said() -> None:
    assert publishing_status(None, Lag(9000, 30.0)) == "ok"
    said = "the shared database is 90 s behind; 9000 rows wait"
    assert publishing_status(None, Lag(9000, 90.4)) == said
