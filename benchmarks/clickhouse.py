"""ClickHouse: publishing to it, its disk, and the API's queries on many rows.

The engine is ClickHouse's own, from chDB in a process of its own, behind the tests' HTTP front: one
statement at a time. BENCH_CLICKHOUSE_ROWS is how many requests are made, a million by default.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import Engine, Table

from agent.catalog.time_units import DAY_S, HOUR_S
from agent.records.objective import JudgedRequest
from agent.store.clickhouse.connecting import client_of, insert_rows
from agent.store.clickhouse.schema import types_of
from agent.store.publishing.destination import shared_ids
from agent.store.rollups import Series
from agent.store.tables import rollup_series, rollups
from benchmarks.clickhouse_parts import (
    WITHIN_S,
    mb_per_million,
    opened_database,
    print_figure,
    timed,
    url_of,
)
from benchmarks.clickhouse_rows import many
from benchmarks.publishing import filled, published
from benchmarks.rollup_load import MODELS, load
from benchmarks.rollup_months import (
    DAYS,
    ENGINES,
    NOW,
    OBJECTIVES,
    QUERY_TARGET_S,
    REQUESTS_PER_S,
    SAMPLE_S,
    figures_by_length,
    window_starts,
)
from tests.outputs.api.serving import open_api_at

# Publishing


def _publishing(engine: Engine, server: psutil.Process) -> None:
    """Rows/s from the end of the first batch to that of the last, and the disk of the requests."""
    with tempfile.TemporaryDirectory() as folder:
        file = filled(Path(folder), 0)
        began_s, server_began_s = time.process_time(), sum(server.cpu_times()[:2])
        ends = published(url_of(engine), file, WITHIN_S)
        file.dispose()
    server_s = sum(server.cpu_times()[:2]) - server_began_s
    processors_s = time.process_time() - began_s + server_s
    (first_at, _), *later = ends
    print_figure(
        "publishing a file",
        f"{sum(rows for _, rows in later) / (later[-1][0] - first_at):,.0f} rows/s, "
        f"{sum(rows for _, rows in ends) / processors_s:,.0f} a second of processors",
    )
    print_figure("disk of a million requests of vLLM's spans", f"{mb_per_million(engine):.0f} MB")


# A month of a fleet


def _months(engine: Engine, server: psutil.Process) -> bool:
    """Whether `/api/v1/breakdown` answers a client in time, as benchmarks.rollup_months asks."""
    _fill_rollups(engine, list(load(SAMPLE_S, REQUESTS_PER_S)))
    with open_api_at(url_of(engine)) as api:
        api.agent.now = NOW

        def groups(by: str) -> int:
            found = api.get(f"/api/v1/breakdown?by={by}&window={DAYS}d").json()["groups"]
            return len(found)

        what = f"{DAYS} days of {ENGINES} engines until now, percentiles by"
        by_model_s, words = timed(server, lambda: groups("model"))
        print_figure(f"{what} model", f"{words} (target {QUERY_TARGET_S * 1e3:.0f} ms)")
        print_figure(f"{what} input length", timed(server, lambda: groups("input_length"))[1])
        print_figure(f"{what} engine", timed(server, lambda: groups("engine"), 2)[1])
        assert groups("model") == MODELS
    return by_model_s <= QUERY_TARGET_S


def _fill_rollups(engine: Engine, sample: list[JudgedRequest]) -> None:
    """The rollups of every width that the window reads, as a publisher writes them."""
    figures = {width_s: figures_by_length(sample, width_s) for width_s in (DAY_S, HOUR_S, 60, 10)}
    starts = list(window_starts())
    with engine.connect() as connection:
        client = client_of(connection)
        for place in range(ENGINES):
            names = (f"agent-{place}", f"chat-{place}", f"model-{place % MODELS}", "")
            series = [Series(*names, length, OBJECTIVES) for length in figures[DAY_S]]
            ids = shared_ids(f"file-{place}", dict(enumerate(series)))
            _insert(
                client,
                rollup_series,
                [each._asdict() | {"id": ids[at]} for at, each in enumerate(series)],
            )
            rows = [
                {"width_s": width_s, "series": ids[at], "starts_at": start, "changed": start}
                | figures[width_s][each.input_length]
                for width_s, start in starts
                for at, each in enumerate(series)
                if each.input_length in figures[width_s]
            ]
            _insert(client, rollups, rows)


def _insert(client: Any, into: Table, rows: list[dict[str, Any]]) -> None:
    types = types_of(into)
    values = [list(row.values()) for row in rows]
    insert_rows(client, into.name, [*rows[0]], [types[name] for name in rows[0]], values)


def run() -> bool:
    """Print the figures; returns whether the target holds."""
    held = True
    measures: list[Any] = [_publishing, _months, many]
    for measure in measures:
        with opened_database() as (engine, server):
            held = measure(engine, server) is not False and held
    return held
