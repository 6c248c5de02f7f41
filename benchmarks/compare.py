"""Time of `compare`: two days with a million requests, in SQLite."""

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import typer
from sqlalchemy import insert

from agent.catalog.time_units import DAY_S
from agent.comparing import compare_runs
from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from agent.store.tables import requests

TARGET_S = 10.0

REQUESTS_PER_DAY = 500_000
_ROWS_PER_INSERT = 10_000
_BEGIN = datetime(2026, 11, 20, tzinfo=UTC)


def run() -> bool:
    """Print the figure; return whether the target is met."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'compare.db'}"
        _fill(url)
        took_s, processor_s = _compared(url)
    print(
        f"compare, two days of {2 * REQUESTS_PER_DAY:,} requests: {processor_s:.1f} s of processor "
        f"time (target under {TARGET_S:.0f}), {took_s:.1f} s in all"
    )
    return processor_s < TARGET_S


def _compared(url: str) -> tuple[float, float]:
    """The seconds of a comparison, and its seconds of processor time in all threads."""
    before, after = (f"{url}#{_BEGIN + timedelta(days=day):%Y-%m-%d}" for day in range(2))
    began, processor_began = time.perf_counter(), time.process_time()
    with redirect_stdout(StringIO()), suppress(typer.Exit):
        compare_runs(before=before, after=after)
    return time.perf_counter() - began, time.process_time() - processor_began


def _fill(url: str) -> None:
    engine = open_engine(url)
    upgrade(engine)
    rows = _rows(random.Random(1))
    with engine.begin() as connection:
        for _ in range(2 * REQUESTS_PER_DAY // _ROWS_PER_INSERT):
            connection.execute(insert(requests), [next(rows) for _ in range(_ROWS_PER_INSERT)])
    engine.dispose()


def _rows(chance: random.Random) -> Iterator[dict[str, Any]]:
    """Requests at a constant rate, as a wide row of a joined request has them."""
    number, step_s = 0, DAY_S / REQUESTS_PER_DAY
    while True:
        ended_at = _BEGIN.timestamp() + number * step_s
        e2e_s, output = chance.lognormvariate(0, 0.4), chance.randrange(20, 400)
        met = chance.random() < 0.95
        yield {
            "trace_id": f"{number:032x}",
            "span_id": f"{number:016x}",
            "vantage": "joined",
            "status": "ok",
            "started_at": ended_at - e2e_s,
            "ended_at": ended_at,
            "received_at": ended_at + 0.5,
            "request_id": f"request-{number}",
            "agent": "agent-0",
            "engine": f"chat-{number % 4}",
            "model": "llama",
            "tenant": f"tenant-{number % 50}",
            "ttft_s": e2e_s / 5,
            "tpot_s": e2e_s * 0.8 / output,
            "e2e_s": e2e_s,
            "input_tokens": chance.randrange(20, 4000),
            "output_tokens": output,
            "verdict": "met" if met else "missed",
            "verdicts": '{"chat": "met"}' if met else '{"chat": "missed"}',
            "cause": None if met else "burst",
            "counted": True,
        }
        number += 1
