"""`kill -9` at random moments under load: what was acknowledged is there, and once."""

import random
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.real_parts.span_sender import ConstantLoad, constant_load
from tests.real_parts.storing_process import (
    PART,
    WHOLE,
    WITHIN_S,
    StoringProcess,
    all_published,
    has_all_once,
    kill,
)

pytestmark = pytest.mark.slow

# `python -m benchmarks long_mix` kills for longer.
KILLS = 10
# A start takes about a tenth of a second; some kills come within it.
_IN_THE_START, _START_S = 0.3, 0.15
_MOST_BATCHES, _BETWEEN_BATCHES_S = 8, 0.01
PAUSE_S = 0.01
_AFTER_PUBLISHING, _LOOK_EVERY_S = 0.2, 0.002


class KilledAgain(StoringProcess):
    """It is started and killed at moments that a seed determines."""

    def __init__(self, folder: Path, command: Sequence[str], storage: dict[str, Any]) -> None:
        super().__init__(folder, command, storage)
        self._moments = random.Random(17)

    def live_and_die(self, load: ConstantLoad) -> None:
        """Start it, and kill it within its start or some batches later."""
        process = self.start()
        try:
            self._wait(load)
        finally:
            kill(process)

    def _wait(self, load: ConstantLoad) -> None:
        if self._moments.random() < _IN_THE_START:
            time.sleep(self._moments.uniform(0, _START_S))
        else:
            load.more_acknowledged(self._moments.randint(1, _MOST_BATCHES))
            time.sleep(self._moments.uniform(0, _BETWEEN_BATCHES_S))


class KilledPublishing(KilledAgain):
    """The same with PostgreSQL: some kills come when it has just committed a batch."""

    def __init__(self, folder: Path, command: Sequence[str], url: str) -> None:
        self.file = folder / "agent.db"
        super().__init__(folder, command, {"publish_to": url, "file": str(self.file)})
        self._shared = psycopg.connect(url.replace("+psycopg", ""), autocommit=True)

    def _wait(self, load: ConstantLoad) -> None:
        if self._moments.random() >= _AFTER_PUBLISHING:
            super()._wait(load)
            return
        before, deadline = self._published(), time.monotonic() + WITHIN_S
        while self._published() == before:
            assert time.monotonic() < deadline, "nothing is published"
            time.sleep(_LOOK_EVERY_S)

    def _published(self) -> int:
        # The first start makes the tables.
        with suppress(psycopg.errors.UndefinedTable):
            found = self._shared.execute("SELECT sum(last) FROM published_files").fetchone()
            return int(found[0] or 0) if found else 0
        return 0

    def close(self) -> None:
        """Close the connection."""
        self._shared.close()


def under_load(killed: KilledAgain) -> ConstantLoad:
    """Kill it so often; returns the load, of which the last start acknowledged the rest."""
    with constant_load(killed.port, PAUSE_S) as load:
        for _ in range(KILLS):
            killed.live_and_die(load)
        process = killed.start()
        try:
            # What was on its way at the last kill comes again.
            load.more_acknowledged(2, of_each=True)
        finally:
            load.stop()
            kill(process)
    return load


def test_a_file_has_what_was_acknowledged_before_every_kill_of_the_agent(tmp_path: Path) -> None:
    file = tmp_path / "goodput.db"
    load = under_load(KilledAgain(tmp_path, WHOLE, {"file": str(file)}))
    has_all_once(f"sqlite:///{file}", load)


def test_file_and_shared_database_have_what_was_acknowledged_before_kills_that_come_in_jobs(
    tmp_path: Path, postgres_url: str
) -> None:
    """Jobs of this part of the agent run each second, so that kills come while it folds."""
    with closing(KilledPublishing(tmp_path, PART, postgres_url)) as killed:
        load = under_load(killed)
    last = killed.start()
    try:
        all_published(killed.file)
    finally:
        kill(last)
    has_all_once(f"sqlite:///{killed.file}", load)
    has_all_once(postgres_url, load)
