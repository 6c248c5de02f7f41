"""The part of the agent that stores, or the whole agent, as a process on a fixed port."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from sqlalchemy import Engine, func, select

from agent.store.connection import open_engine
from agent.store.publishing.changes import lag_of
from agent.store.tables import requests, rollup_changes
from tests.real_parts.ports import free_port
from tests.real_parts.processes import ServerProcess
from tests.real_parts.settable_clock import SettableClock
from tests.real_parts.span_sender import ConstantLoad
from tests.real_parts.waiting import eventually
from tests.store.making import counted_rollups, counted_rows

WITHIN_S = 120.0
PART = ["-m", "tests.real_parts.storing_part"]
WHOLE = ["-m", "agent", "run", "--config"]


class StoringProcess:
    """What is started in a folder, again after each kill; `port` takes spans over HTTP."""

    def __init__(self, folder: Path, command: Sequence[str], storage: dict[str, Any]) -> None:
        self._folder = folder
        self.port = free_port()
        self.clock = SettableClock(folder / "clock")
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

    def start(self) -> ServerProcess:
        """Start it."""
        return ServerProcess(self._command, self._folder / "agent.log")


def kill(process: ServerProcess) -> None:
    """Kill it, also when it has no process group yet that could be killed."""
    os.kill(process.pid, signal.SIGKILL)
    process.wait(within_s=WITHIN_S)


def all_published(file: Path) -> None:
    """Return when nothing waits in this file, whose agent also folds."""
    engine = open_engine(f"sqlite:///{file}")
    eventually(lambda: _is_published(engine), within_s=WITHIN_S, what="nothing that waits")
    engine.dispose()


def _is_published(file: Engine) -> bool:
    with file.connect() as connection:
        unfolded = connection.scalar(select(func.count()).select_from(rollup_changes))
        return lag_of(connection).rows == unfolded == 0


def has_all_once(url: str, *loads: ConstantLoad) -> None:
    """Every acknowledged request is in a database, none is twice, and the rollups are theirs."""
    engine = open_engine(url)
    with engine.connect() as connection:
        found = Counter(connection.execute(select(requests.c.trace_id)).scalars())
    acknowledged = {trace for load in loads for trace in load.acknowledged}
    assert acknowledged <= found.keys() <= {trace for load in loads for trace in load.sent}
    assert set(found.values()) == {1}
    assert counted_rollups(engine) == counted_rows(engine)
    engine.dispose()
