"""The running agent while its database fails: readiness, acknowledgements and the stop."""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.outputs.api.serving import open_api
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.postgres import PostgresServer
from tests.real_parts.span_sender import SpanSender, request_span
from tests.real_parts.waiting import eventually
from tests.records.making import objective, record
from tests.sources.engines.wire import EngineServer

pytestmark = pytest.mark.slow

WITHIN_S = 120.0
# A /readyz that asked a database which does not answer would take at least its waits of 10 s.
READY_ANSWERS_WITHIN_S = 5.0
STREAM = b'data: {"choices": [{"index": 0, "delta": {"content": "hi"}}]}\n\ndata: [DONE]\n\n'
GARBAGE = b"Dear diary, this is no database. " * 500


@dataclass
class Attacked:
    """A running agent, its sender of spans, and where its database is."""

    agent: AgentProcess
    sender: SpanSender
    folder: Path
    sent: int = 0

    @property
    def file(self) -> Path:
        """The SQLite file."""
        return self.folder / "goodput.db"

    def ready(self) -> tuple[int, dict[str, Any]]:
        """The status and body of /readyz."""
        response = requests.get(f"{self.agent.url}/readyz", timeout=READY_ANSWERS_WITHIN_S)
        return response.status_code, response.json()

    def store_says(self, *words: str) -> str:
        """What /readyz says of the store, once it says one of these words and is not ready."""

        def read() -> str:
            status, body = self.ready()
            said: str = body["parts"]["store"]
            return said if status == 503 and any(word in said for word in words) else ""

        return eventually(read, within_s=WITHIN_S, what=f"/readyz with {words}")

    def is_ready(self) -> None:
        """Wait for a 200 of /readyz."""
        eventually(lambda: self.ready()[0] == 200, within_s=WITHIN_S, what="readiness")

    def export(self) -> bool:
        """Whether a new span is acknowledged."""
        self.sent += 1
        return self.sender.export([request_span(f"request-{self.sent}")])

    def acknowledges(self) -> None:
        """Send new spans until one is acknowledged."""
        eventually(self.export, within_s=WITHIN_S, what="an acknowledged span")


@contextmanager
def attacked(folder: Path, *, path: str = "/readyz", **settings: Any) -> Iterator[Attacked]:
    """An agent that was started and answers at the path."""
    ports = AgentPorts.free()
    agent = prepared(folder, ports, **settings)
    agent.start_until(path)
    try:
        yield Attacked(agent, SpanSender(ports.grpc), folder)
    finally:
        agent.stop()


def prepared(folder: Path, ports: AgentPorts, **settings: Any) -> AgentProcess:
    engines = [{"name": "chat-0", "url": f"http://127.0.0.1:{free_port()}"}]
    folder.mkdir(exist_ok=True)
    return AgentProcess.with_settings(folder, ports, {"engines": engines} | settings)


def stored(file: Path) -> set[str]:
    """The trace ids in the database at a path."""
    with closing(sqlite3.connect(file, timeout=30)) as database:
        return {trace_id for (trace_id,) in database.execute("SELECT trace_id FROM requests")}


# While it runs


@pytest.fixture(scope="module")
def on_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """An agent that survives one attack after another."""
    with attacked(tmp_path_factory.mktemp("sqlite")) as agent:
        yield agent


@contextmanager
def locked(file: Path) -> Iterator[None]:
    with closing(sqlite3.connect(file, timeout=30, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        yield
        database.execute("ROLLBACK")


def test_a_locked_file_is_told_while_it_is_locked(on_sqlite: Attacked) -> None:
    on_sqlite.acknowledges()
    with locked(on_sqlite.file):
        assert not on_sqlite.export()
        said = on_sqlite.store_says("locked", "waits for the database")
        assert on_sqlite.ready()[1]["problems"][0].startswith(said[:20])
        assert on_sqlite.ready()[1]["parts"]["receivers"] != "ok"
        assert on_sqlite.ready()[1]["parts"]["engines"] == "0 of 1 answer"
    on_sqlite.acknowledges()
    on_sqlite.is_ready()


def _files(file: Path) -> Sequence[Path]:
    return [Path(f"{file}{ending}") for ending in ("", "-wal", "-shm")]


def _delete_all(file: Path) -> None:
    for each in _files(file):
        each.unlink()


def _delete_the_log(file: Path) -> None:
    _files(file)[1].unlink()


def _replace(file: Path) -> None:
    """By an older copy, as a restore of a backup does."""
    backup = file.with_name("backup.db")
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(backup)) as copy:
        source.backup(copy)
    backup.replace(file)


@pytest.mark.parametrize("attack", [_delete_all, _replace, _delete_the_log])
def test_what_is_acknowledged_after_the_file_is_gone_is_in_the_file_at_the_path(
    on_sqlite: Attacked, attack: Any
) -> None:
    on_sqlite.acknowledges()
    sender = on_sqlite.sender
    before = set(sender.acknowledged)
    attack(on_sqlite.file)
    for _ in range(10):
        on_sqlite.acknowledges()
    assert len(sender.acknowledged - before) == 10
    assert sender.acknowledged - before <= stored(on_sqlite.file)
    assert "the database's file was deleted or replaced" in on_sqlite.agent.log()
    on_sqlite.is_ready()
    with closing(sqlite3.connect(on_sqlite.file, timeout=30)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    # Queries read the file at the path too.
    assert {row["trace_id"] for row in on_sqlite.agent.api.requests(limit="1000")} >= (
        sender.acknowledged - before
    )


def test_a_deleted_file_is_seen_without_any_traffic(on_sqlite: Attacked) -> None:
    _delete_all(on_sqlite.file)
    eventually(on_sqlite.file.exists, within_s=WITHIN_S, what="a new file")
    on_sqlite.is_ready()
    assert on_sqlite.export()


# Stopping

# `AgentProcess.stop` kills it after 30 s, and an agent without a proxy has 10 s.
NO_LONGER_THAN_S = 20.0


def stops_in_time(agent: AgentProcess) -> None:
    started = time.monotonic()
    agent.stop()
    assert time.monotonic() - started < NO_LONGER_THAN_S


def test_a_stop_ends_in_time_while_the_file_is_locked(on_sqlite: Attacked) -> None:
    before = set(on_sqlite.sender.acknowledged)
    on_sqlite.acknowledges()
    with locked(on_sqlite.file):
        assert not on_sqlite.export()
        stops_in_time(on_sqlite.agent)
    assert on_sqlite.sender.acknowledged - before <= stored(on_sqlite.file)
    on_sqlite.agent.start()


def test_a_stop_ends_in_time_while_the_shared_database_answers_nothing(
    tmp_path: Path, postgres_url: str, postgres_server: PostgresServer
) -> None:
    ports = AgentPorts.free()
    agent = prepared(tmp_path, ports, storage={"publish_to": postgres_url})
    agent.start()
    with postgres_server.frozen():
        assert SpanSender(ports.grpc).export([request_span("while it is frozen")])
        stops_in_time(agent)


# At the start


def chat(port: int) -> requests.Response:
    """A streamed chat completion through the proxy."""
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    return requests.post(url, json=body, timeout=60)


def test_the_doors_open_and_streams_pass_before_the_store_does(tmp_path: Path) -> None:
    missing, port = tmp_path / "missing", free_port()
    file = missing / "goodput.db"
    proxy = {"listen": f"127.0.0.1:{port}", "join_wait": "1s"}
    with EngineServer() as engine:
        event_stream = ("Content-Type: text/event-stream",)
        engine.answers("/v1/chat/completions", STREAM, headers=event_stream)
        settings = {
            "engines": [{"name": "chat-0", "url": engine.url}],
            "storage": {"file": str(file)},
            "proxy": proxy,
        }
        with attacked(tmp_path, path="/healthz", **settings) as agent:
            assert chat(port).content == STREAM
            assert not agent.export()
            said = agent.store_says("the database's file cannot be opened")
            assert str(tmp_path) not in said
            assert requests.get(f"{agent.agent.url}/api/v1/summary", timeout=60).status_code == 503
            eventually(
                lambda: agent.ready()[1]["parts"]["proxy"].startswith("streams pass; 1 request"),
                within_s=WITHIN_S,
                what="a waiting record",
            )
            missing.mkdir()
            agent.acknowledges()
            agent.is_ready()
            assert agent.sender.acknowledged <= stored(file)
            # The request that came before the store has its row.
            eventually(lambda: "proxy" in vantages(file), within_s=WITHIN_S, what="its row")


def vantages(file: Path) -> list[str]:
    """Who saw the stored requests."""
    with closing(sqlite3.connect(file, timeout=30)) as database:
        return [vantage for (vantage,) in database.execute("SELECT vantage FROM requests")]


def test_a_corrupt_file_stays_as_it_is_unless_it_is_to_be_set_aside(tmp_path: Path) -> None:
    file = tmp_path / "goodput.db"
    file.write_bytes(GARBAGE)
    with attacked(tmp_path, path="/healthz") as agent:
        assert not agent.export()
        said = agent.store_says("corrupt")
        assert "goodput.db" in said
        assert "storage.on_corrupt: set_aside" in said
        assert f"{file}: " in agent.agent.log()
    assert file.read_bytes() == GARBAGE
    with attacked(tmp_path, storage={"on_corrupt": "set_aside"}) as agent:
        assert agent.export()
        assert agent.sender.acknowledged <= stored(file)
    (aside,) = tmp_path.glob("goodput.db.corrupt-*")
    assert aside.read_bytes() == GARBAGE
    assert str(aside) in agent.agent.log()


# Two agents of one file


def _limits(file: Path) -> list[tuple[str, str]]:
    query = "SELECT name, definition FROM objectives WHERE in_force_until IS NULL"
    with closing(sqlite3.connect(file, timeout=30)) as database:
        return database.execute(query).fetchall()


def test_a_second_agent_of_one_file_waits_until_the_first_has_ended(tmp_path: Path) -> None:
    file = tmp_path / "goodput.db"
    common = {"name": "chat", "storage": {"file": str(file)}}
    loose = {"objectives": [{"name": "chat", "ttft_ms": 9000}]}
    first_ports = AgentPorts.free()
    first = prepared(tmp_path / "first", first_ports, **common)
    first.start()
    in_force = _limits(file)
    with attacked(tmp_path / "second", path="/healthz", **common, **loose) as second:
        assert not second.export()
        said = second.store_says("another agent writes to goodput.db")
        assert "`storage.file` of its own" in said
        assert _limits(file) == in_force
        assert SpanSender(first_ports.grpc).export([request_span("of the first")])
        # The kernel ends a killed agent's lock.
        first.kill()
        second.acknowledges()
        second.is_ready()
        assert '"ttft_s": 9.0' in _limits(file)[0][1]


# On a file with damaged rows


@pytest.fixture
def on_damaged_rows(tmp_path: Path) -> Iterator[Attacked]:
    """An agent whose file has 10 requests of each of 3 models; one request and the rollups of one
    model cannot be read."""
    at = time.time() - 1800
    with open_api(tmp_path) as api:
        api.agent.now = time.time()
        api.store(
            [
                record(number, model=f"m{number % 3}", started_at=at - 1, ended_at=at)
                for number in range(30)
            ],
            [objective()],
        )
        api.fold_and_expire()
    with closing(sqlite3.connect(tmp_path / "goodput.db")) as database, database:
        database.execute("UPDATE requests SET verdicts = '{' WHERE request_id = 'request-5'")
        database.execute(
            "UPDATE rollups SET counts = x'09' "
            "WHERE series IN (SELECT id FROM rollup_series WHERE model = 'm0')"
        )
    with attacked(tmp_path) as agent:
        yield agent


def test_rows_that_cannot_be_read_take_no_figures_of_the_others(on_damaged_rows: Attacked) -> None:
    api = on_damaged_rows.agent.api
    assert api.summary(window="2h")["requests"] == 20
    assert len(api.requests(limit="1000")) == 29
    exposition, metric = api.exposition(), "llm_agent_unreadable_rows_total"
    assert total(exposition, metric, table="requests") == 1
    # The rollup of the minute, and the longer ones that queries read.
    count = int(total(exposition, metric, table="rollups"))
    assert count > 0
    assert on_damaged_rows.ready()[1]["parts"]["store"] == (
        f"rows that cannot be read are left out: 1 of requests, {count} of rollups"
    )
