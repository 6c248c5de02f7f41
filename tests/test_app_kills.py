"""`kill -9` at random moments under load: what was acknowledged is there, and once."""

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from sqlalchemy import Engine, select

from agent.store.connection import open_engine
from agent.store.journal.waiting import lag_of
from agent.store.tables import requests
from tests.real_parts.constant_load import ConstantLoad, constant_load
from tests.real_parts.ports import free_port
from tests.real_parts.processes import ServerProcess
from tests.real_parts.waiting import eventually
from tests.store.making import counted_rollups, counted_rows

pytestmark = pytest.mark.slow

WITHIN_S = 120.0
# For each kind of database. The part of the agent that stores is killed so often; the whole agent,
# whose start takes several times as long, less often.
KILLS, KILLS_OF_ALL = 100, 6
PART = ["-m", "tests.real_parts.storing_part"]
WHOLE = ["-m", "agent", "run", "--config"]
# A start takes about a tenth of a second; some kills come within it.
_IN_THE_START, _START_S = 0.3, 0.15
_MOST_BATCHES, _BETWEEN_BATCHES_S = 8, 0.01
_AFTER_FORWARDING, _LOOK_EVERY_S = 0.2, 0.002


class KilledAgain:
    """What stores in a folder is started and killed at moments that a seed determines."""

    def __init__(self, folder: Path, command: Sequence[str], storage: dict[str, Any]) -> None:
        self._folder = folder
        self.port = free_port()
        config = folder / "agent.yml"
        settings = {
            "name": "agent-0",
            "engines": [{"name": "chat-0", "url": f"http://127.0.0.1:{free_port()}"}],
            "listen": {"port": free_port()},
            "otlp": {"grpc": None, "http": f"127.0.0.1:{self.port}"},
            "nvml": {"enabled": False},
            "storage": storage,
        }
        config.write_text(yaml.safe_dump(settings))
        self._command: list[str | Path] = [sys.executable, *command, config]
        self._moments = random.Random(17)

    def start(self) -> ServerProcess:
        """Start it."""
        return ServerProcess(self._command, self._folder / "agent.log")

    def live_and_die(self, load: ConstantLoad) -> None:
        """Start it, and kill it within its start or some batches later."""
        process = self.start()
        try:
            self._wait(load)
        finally:
            # At first it has no process group that could be killed.
            os.kill(process.pid, signal.SIGKILL)
            process.wait(within_s=WITHIN_S)

    def _wait(self, load: ConstantLoad) -> None:
        if self._moments.random() < _IN_THE_START:
            time.sleep(self._moments.uniform(0, _START_S))
        else:
            load.more_acknowledged(self._moments.randint(1, _MOST_BATCHES))
            time.sleep(self._moments.uniform(0, _BETWEEN_BATCHES_S))


class KilledForwarding(KilledAgain):
    """The same with a journal: some kills come when PostgreSQL has just committed a batch."""

    def __init__(self, folder: Path, command: Sequence[str], url: str) -> None:
        self.file = folder / "journal.db"
        super().__init__(folder, command, {"url": url, "journal": {"path": str(self.file)}})
        self._shared = psycopg.connect(url.replace("+psycopg", ""), autocommit=True)

    def _wait(self, load: ConstantLoad) -> None:
        if self._moments.random() >= _AFTER_FORWARDING:
            super()._wait(load)
            return
        before, deadline = self._forwarded(), time.monotonic() + WITHIN_S
        while self._forwarded() == before:
            assert time.monotonic() < deadline, "nothing is forwarded"
            time.sleep(_LOOK_EVERY_S)

    def _forwarded(self) -> int:
        # The first start makes the tables.
        with suppress(psycopg.errors.UndefinedTable):
            found = self._shared.execute("SELECT sum(forwarded) FROM journals").fetchone()
            return int(found[0] or 0) if found else 0
        return 0

    def close(self) -> None:
        """Close the connection."""
        self._shared.close()


def under_load(killed: KilledAgain, kills: int) -> ConstantLoad:
    """Kill it so often; returns the load, of which the last start acknowledged the rest."""
    with constant_load(killed.port) as load:
        for _ in range(kills):
            killed.live_and_die(load)
        process = killed.start()
        try:
            # What was on its way at the last kill comes again.
            load.more_acknowledged(2, of_each=True)
        finally:
            load.stop()
            os.kill(process.pid, signal.SIGKILL)
            process.wait(within_s=WITHIN_S)
    return load


def has_all_once(engine: Engine, load: ConstantLoad) -> None:
    """Every acknowledged request is in the database, none is twice, and the rollups are theirs."""
    with engine.connect() as connection:
        found = Counter(connection.execute(select(requests.c.trace_id)).scalars())
    assert load.acknowledged <= found.keys() <= load.sent
    assert set(found.values()) == {1}
    assert counted_rollups(engine) == counted_rows(engine)


def waiting(journal: Engine) -> int:
    """How many changes wait in a journal."""
    with journal.connect() as connection:
        return lag_of(connection).rows


@pytest.mark.parametrize(("command", "kills"), [(PART, KILLS), (WHOLE, KILLS_OF_ALL)])
def test_sqlite_has_what_was_acknowledged_before_every_kill(
    tmp_path: Path, command: Sequence[str], kills: int
) -> None:
    url = f"sqlite:///{tmp_path / 'goodput.db'}"
    load = under_load(KilledAgain(tmp_path, command, {"url": url}), kills)
    engine = open_engine(url)
    has_all_once(engine, load)
    engine.dispose()


@pytest.mark.parametrize(("command", "kills"), [(PART, KILLS), (WHOLE, KILLS_OF_ALL)])
def test_journal_and_shared_database_have_what_was_acknowledged_before_every_kill(
    tmp_path: Path, postgres_url: str, command: Sequence[str], kills: int
) -> None:
    with closing(KilledForwarding(tmp_path, command, postgres_url)) as killed:
        load = under_load(killed, kills)
    journal, shared = open_engine(f"sqlite:///{killed.file}"), open_engine(postgres_url)
    last = killed.start()
    try:
        eventually(lambda: waiting(journal) == 0, within_s=WITHIN_S, what="an empty journal")
    finally:
        last.kill()
    for engine in (journal, shared):
        has_all_once(engine, load)
        engine.dispose()
