"""Memory of the agent and its worker over a million proxied requests of many tenants and models."""

import asyncio
import os
import random
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import requests
import uvloop

from benchmarks.proxy_engine import MODELS
from benchmarks.proxy_load import LoadConnection, chat, connections
from benchmarks.proxy_peers import agent_before, running
from tests.real_parts.ports import free_port

TENANTS = 50
AT_ONCE = 16
# More than any engine of today completes, and less than a worker can pass.
REQUESTS_PER_S = 1500
PARTS = 10
# Each connection sends the same number in each part.
REQUESTS = int(os.environ.get("BENCH_PROXIED", "1000000")) // PARTS // AT_ONCE * AT_ONCE * PARTS
# Rows wait ten seconds for a span of the engine.
SETTLED_WITHIN_S = 300
# Booking a minute reads up to 200,000 rows (MAX_ROWS_AGAIN), which are there after three minutes:
# the most memory from the fourth tenth on is compared with that after the fourth.
FIRST_STEADY = 3
TARGET_GROWTH = 1.25


async def _send(port: int, number: int, seed: int) -> None:
    groups = product(range(TENANTS), MODELS)
    each = [chat(port, "brief", model=model, key=f"tenant-{tenant}") for tenant, model in groups]
    chosen = random.Random(seed)

    async def sequence(connection: LoadConnection) -> None:
        began = time.monotonic()
        for sent in range(number // AT_ONCE):
            due = began + sent * AT_ONCE / REQUESTS_PER_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await connection.ttft_s(chosen.choice(each))

    async with connections(port, AT_ONCE) as opened:
        await asyncio.gather(*map(sequence, opened))


def _resident_mb(process: psutil.Process) -> dict[str, int]:
    return {child.name(): child.memory_info().rss // 1_000_000 for child in process.children()}


def _settled(api: str) -> tuple[int, float]:
    """Wait until each request is in the summary or dropped; return how many are, and were."""
    deadline = time.monotonic() + SETTLED_WITHIN_S
    while True:
        counted, dropped = _counts(api)
        if counted + dropped >= REQUESTS or time.monotonic() > deadline:
            return counted, dropped
        time.sleep(1)


def _counts(api: str) -> tuple[int, float]:
    summary = requests.get(f"{api}/api/v1/summary?window=24h", timeout=60).json()
    exposition = requests.get(f"{api}/metrics", timeout=60).text.splitlines()
    name = 'llm_agent_proxy_failures_total{reason="store_behind"}'
    (dropped,) = (float(line.split()[1]) for line in exposition if line.startswith(name))
    return int(summary["requests"]), dropped


def _report(resident: Sequence[dict[str, int]]) -> bool:
    met = True
    for name in resident[0]:
        mb = [each[name] for each in resident]
        growth = max(mb[FIRST_STEADY:]) / mb[FIRST_STEADY]
        met = met and growth <= TARGET_GROWTH
        print(
            f"proxied requests, RSS in MB of {name} after each tenth of {REQUESTS:,}, "
            f"{TENANTS} tenants, {len(MODELS)} models: {' '.join(map(str, mb))}: "
            f"at most {growth:.2f} of the fourth (target at most {TARGET_GROWTH})"
        )
    return met


def run() -> bool:
    """Print the figures; return whether the target is met."""
    cores = set(os.sched_getaffinity(0))
    with TemporaryDirectory() as name:
        folder, engine, port, listen = Path(name), free_port(), free_port(), free_port()
        command = [sys.executable, "-m", "benchmarks.proxy_engine", str(engine)]
        agent = agent_before(port, f"http://127.0.0.1:{engine}", folder, listen=listen)
        with (
            running("engine", command, engine, cores, folder),
            running("agent", agent, port, cores, folder) as served,
        ):
            resident = []
            for part in range(PARTS):
                uvloop.run(_send(port, REQUESTS // PARTS, part))
                resident.append(_resident_mb(served.process))
            counted, dropped = _settled(f"http://127.0.0.1:{listen}")
    print(f"proxied requests: {counted:,} in the summary, {dropped:,.0f} dropped and counted")
    return _report(resident) and counted + dropped == REQUESTS
