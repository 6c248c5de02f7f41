"""Time of `report`: a day of a million requests, in SQLite, as an HTML file."""

import tempfile
import time
from itertools import islice
from pathlib import Path

from sqlalchemy import Engine

from agent.app.serving import stored_api
from agent.catalog.time_units import DAY_S
from agent.outputs.report.document import document_of, read_figures
from agent.outputs.report.formats import html_page
from agent.settings import load as settings_of
from agent.store.folding import RollupStore
from agent.store.transactions import request_write
from benchmarks.rollup_load import load
from tests.store.migrated import migrated_in

TARGET_S = 5.0
REQUESTS = 1_000_000
_REQUESTS_PER_WRITE = 1000
_WRITES_PER_FOLD = 20


def run() -> bool:
    """Print the figure; return whether the target is met."""
    with tempfile.TemporaryDirectory() as folder, migrated_in(Path(folder)) as engine:
        fill(engine)
        took_s, requests = _reported(Path(folder) / "goodput.db")
    print(
        f"report, a day of {requests:,} requests as HTML: {took_s:.2f} s "
        f"(target under {TARGET_S:.0f})"
    )
    return took_s < TARGET_S and requests > 0.99 * REQUESTS


def _reported(file: Path) -> tuple[float, int]:
    began = time.perf_counter()
    with stored_api(settings_of(None, {"GOODPUT_STORAGE__FILE": str(file)})) as read:
        figures = read_figures(read, {"window": "24h"}, lambda: None)
    html_page(document_of(figures))
    return time.perf_counter() - began, figures.summary["requests"]


def fill(engine: Engine) -> None:
    """Store a day of requests as agents write: small commits, and folds of rollups between them."""
    write, rollups = request_write(engine), RollupStore(engine, "agent-0")
    judged = load(DAY_S, REQUESTS / DAY_S, time.time() - DAY_S + 60)
    for number in range(REQUESTS // _REQUESTS_PER_WRITE):
        write(list(islice(judged, _REQUESTS_PER_WRITE)))
        if number % _WRITES_PER_FOLD == _WRITES_PER_FOLD - 1:
            rollups.fold()
