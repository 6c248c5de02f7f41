"""Memory of an agent after a million requests, and the time of a summary over them."""

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import psutil
import requests

from benchmarks.exports import SPANS_PER_EXPORT, export_body
from tests.real_parts.ports import free_port

REQUESTS = int(os.environ.get("BENCH_REQUESTS", "1000000"))
TARGET_RSS_BYTES = 200_000_000
TARGET_SUMMARY_S = 0.050
SUMMARIES = 30
STOP_S = 20

_EXACT = """
SELECT count(*), sum(verdict = 'met'), sum(output_tokens) FROM requests
WHERE ended_at >= datetime('now', '-1 hour')
"""


@contextmanager
def _agent(folder: Path) -> Iterator[tuple[psutil.Process, str, str]]:
    """Run an agent with an unreachable engine; its process, API URL and OTLP URL."""
    listen, otlp = free_port(), free_port()
    settings = {
        "listen": {"port": listen},
        "otlp": {"grpc": None, "http": f"127.0.0.1:{otlp}"},
        "storage": {"file": str(folder / "goodput.db")},
        "engines": [{"name": "chat-0", "url": "http://127.0.0.1:9", "scrape_interval": "1h"}],
    }
    (folder / "settings.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "agent", "run", "--config", str(folder / "settings.yaml")]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            api = f"http://127.0.0.1:{listen}"
            _wait_until_ready(api, process)
            yield psutil.Process(process.pid), api, f"http://127.0.0.1:{otlp}/v1/traces"
        finally:
            process.terminate()
            process.wait(STOP_S)


def _wait_until_ready(api: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if requests.get(f"{api}/readyz", timeout=1).ok:
                return
        except requests.ConnectionError:
            time.sleep(0.1)
    raise RuntimeError("the agent did not become ready within 30 s")


def _send(session: requests.Session, url: str, number: int, ended_at: float) -> None:
    headers = {"Content-Type": "application/x-protobuf"}
    response = session.post(url, export_body(number, ended_at), headers=headers, timeout=30)
    response.raise_for_status()


def _fill(url: str, process: psutil.Process) -> list[int]:
    """Send all requests, spread over the last hour; return RSS in bytes after each tenth."""
    session, exports, resident = requests.Session(), REQUESTS // SPANS_PER_EXPORT, []
    began = time.time()
    for number in range(exports):
        _send(session, url, number, began - 3500 * (1 - number / exports))
        if (number + 1) % (exports // 10) == 0:
            resident.append(int(process.memory_info().rss))
    return resident


def _summary_s(api: str) -> float:
    session, took_s = requests.Session(), []
    for _ in range(SUMMARIES):
        began = time.perf_counter()
        response = session.get(f"{api}/api/v1/summary?window=1h", timeout=30)
        took_s.append(time.perf_counter() - began)
        assert response.json()["requests"] > 0.9 * REQUESTS, response.text
    return median(took_s)


def _scan_s(folder: Path) -> float:
    """Return the seconds of a SQLite count over the same rows, without percentiles."""
    connection = sqlite3.connect(folder / "goodput.db")
    took_s = []
    for _ in range(3):
        began = time.perf_counter()
        connection.execute(_EXACT).fetchall()
        took_s.append(time.perf_counter() - began)
    return median(took_s)


def run() -> bool:
    """Print memory and summary times; return whether both targets are met."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _agent(folder) as (process, api, otlp):
            resident = _fill(otlp, process)
            summary_s = _summary_s(api)
            scan_s = _scan_s(folder)
    tenths = " ".join(f"{size / 1e6:.0f}" for size in resident)
    print(
        f"memory, RSS in MB after each tenth of {REQUESTS:,} requests: {tenths} "
        f"(target under {TARGET_RSS_BYTES / 1e6:.0f})"
    )
    print(
        f"summary of the last hour, all {REQUESTS:,} rows in it: {1000 * summary_s:.1f} ms "
        f"(target under {1000 * TARGET_SUMMARY_S:.0f} ms), "
        f"{summary_s / scan_s:.3f} of the time of a count over the rows"
    )
    return max(resident) < TARGET_RSS_BYTES and summary_s < TARGET_SUMMARY_S
