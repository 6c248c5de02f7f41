"""An hour of twenty agents at 2,000 requests/s together into one PostgreSQL, with an outage."""

import ctypes
import tempfile
import time
from pathlib import Path

import psutil
from sqlalchemy import func, select

from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from agent.store.publishing.destination import CUT_OFF_S
from agent.store.tables import requests
from tests.real_parts.postgres import PostgresServer
from tests.store.publishing.published import Fleet, running_fleet

AGENTS, PER_S, SECONDS = 20, 100, 3600
# PostgreSQL is away while the rows of ten minutes come.
OUTAGE_S = range(1200, 1800)
_STEP_S = 120
_CATCHES_UP_S = 1800.0
# Relative to the memory in the first tenth of the hour; the bounds of a file are those on disk.
TARGET_GROWTH = 1.25


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
