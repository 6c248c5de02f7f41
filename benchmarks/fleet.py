"""An hour of twenty agents at 2,000 requests/s together into one PostgreSQL, with an outage."""

import ctypes
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from sqlalchemy import Engine, func, select

from agent.errors import StoreUnavailable
from agent.records.objective import JudgedRequest
from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from agent.store.publishing.destination import CUT_OFF_S
from agent.store.tables import requests
from agent.store.transactions import request_write
from agent.store.writing import Write
from tests.real_parts.postgres import PostgresServer
from tests.real_parts.waiting import eventually
from tests.store.making import NOON, WITHIN_S, request
from tests.store.publishing.published import Publishing, file_in, publishing

AGENTS, PER_S, SECONDS = 20, 100, 3600
# PostgreSQL is away while the rows of ten minutes come.
OUTAGE_S = range(1200, 1800)
_STEP_S = 120
_CATCHES_UP_S = 1800.0
# Relative to the memory in the first tenth of the hour; the bounds of a file are those on disk.
TARGET_GROWTH = 1.25
# Of one agent: enough for a day at a hundred a second.
_NUMBERS = 10_000_000


@dataclass(frozen=True, slots=True)
class Fleet:
    """Running agents, each with its file and publisher; each gets `per_s` requests/s."""

    files: list[Engine]
    publishing: list[Publishing]
    per_s: int

    def work(self, first_s: int, last_s: int) -> None:
        """Each agent stores the requests of these seconds, a commit for each second."""

        def of_agent(agent: int) -> None:
            write = request_write(self.files[agent])
            for second in range(first_s, last_s):
                _write_until_stored(write, list(self._ended(agent, second)))

        with ThreadPoolExecutor(len(self.files)) as agents:
            list(agents.map(of_agent, range(len(self.files))))

    def _ended(self, agent: int, second: int) -> Iterator[JudgedRequest]:
        began_at = NOON + second
        for number in range(second * self.per_s, (second + 1) * self.per_s):
            yield request(
                agent * _NUMBERS + number,
                agent=f"agent-{agent}",
                engine=f"chat-{agent}",
                started_at=began_at,
                ended_at=began_at + 1.0,
            )

    def waiting(self) -> int:
        """How many rows wait in all files."""
        return sum(each.waiting() for each in self.publishing)

    def all_published(self, within_s: float = WITHIN_S) -> None:
        """Wait until no file has anything that waits."""
        eventually(lambda: self.waiting() == 0, within_s=within_s, what="nothing that waits")


def _write_until_stored(write: Write, judged: list[JudgedRequest]) -> None:
    """Send again what was refused, as exporters do: a busy disk may keep the lock too long."""
    while True:
        try:
            write(judged)
        except StoreUnavailable:
            continue
        return


@contextmanager
def running_fleet(
    folder: Path, url: str, *, agents: int, per_s: int, cut_off_s: float = CUT_OFF_S
) -> Iterator[Fleet]:
    """A fleet whose files are in this folder; at the end everything is published."""
    with ExitStack() as stack:
        files = [
            stack.enter_context(file_in(folder, f"agent-{number}.db")) for number in range(agents)
        ]
        running = [
            stack.enter_context(publishing(file, url, agent=f"agent-{number}", cut_off_s=cut_off_s))
            for number, file in enumerate(files)
        ]
        yield Fleet(files, running, per_s)


def run() -> bool:
    """Print the figures; return whether no row is lost or stored twice, and memory stays flat."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The server's user must be able to open it.
        folder.chmod(0o755)
        (folder / "server").mkdir()
        server = PostgresServer(folder / "server")
        try:
            return _hour(folder, server)
        finally:
            server.stop()


def _hour(folder: Path, server: PostgresServer) -> bool:
    began_s, rss_mb = time.perf_counter(), []
    with server.new_database() as url:
        engine = open_engine(url)
        upgrade(engine)
        with running_fleet(folder, url, agents=AGENTS, per_s=PER_S, cut_off_s=CUT_OFF_S) as fleet:
            for first_s in range(0, SECONDS, _STEP_S):
                _step(fleet, server, first_s)
                rss_mb.append(_memory_mb())
            fleet.all_published(_CATCHES_UP_S)
        took_s = time.perf_counter() - began_s
        with engine.connect() as connection:
            rows = connection.scalar(select(func.count()).select_from(requests))
            keys = select(requests.c.trace_id, requests.c.span_id).distinct().subquery()
            different = connection.scalar(select(func.count()).select_from(keys))
        engine.dispose()
    wanted = AGENTS * PER_S * SECONDS
    growth = max(rss_mb[3:]) / max(rss_mb[:3])
    print(
        f"fleet, {AGENTS} agents, {wanted:,} requests, PostgreSQL away for {len(OUTAGE_S)} of "
        f"{SECONDS} s: {rows:,} rows of {different:,} requests in {took_s:.0f} s; memory of all "
        f"agents in one process {' '.join(f'{each:.0f}' for each in rss_mb[::3])} MB, at most "
        f"{growth:.2f} of the first tenth's (target at most {TARGET_GROWTH})"
    )
    return rows == different == wanted and growth <= TARGET_GROWTH


def _memory_mb() -> float:
    """Memory without what was freed: glibc keeps that for each thread, here of twenty agents."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return float(psutil.Process().memory_info().rss / 1e6)


def _step(fleet: Fleet, server: PostgresServer, first_s: int) -> None:
    if first_s == OUTAGE_S.start:
        server.stop()
    if first_s == OUTAGE_S.stop:
        server.restart()
    fleet.work(first_s, first_s + _STEP_S)
