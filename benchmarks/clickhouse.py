"""ClickHouse: forwarding to it, its disk, and the API's queries on many rows.

The engine is ClickHouse's own, from chDB in a process of its own, behind the tests' HTTP front: one
statement at a time. BENCH_CLICKHOUSE_ROWS is how many requests are made, a million by default.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import Engine

from agent.catalog.time_units import DAY_S
from agent.records.objective import JudgedRequest
from agent.store.clickhouse.connecting import client_of, insert_rows
from agent.store.clickhouse.vector_rows import rows_of
from agent.store.rollups import FIGURES
from benchmarks.clickhouse_parts import (
    WITHIN_S,
    mb_per_million,
    opened_database,
    print_figure,
    timed,
    url_of,
)
from benchmarks.clickhouse_rows import many
from benchmarks.forwarding import filled, forwarded, rows_per_s
from benchmarks.rollup_load import MODELS, TODAY, load
from benchmarks.rollup_months import (
    DAYS,
    ENGINES,
    NOW,
    OBJECTIVES,
    QUERY_TARGET_S,
    REQUESTS_PER_S,
    SAMPLE_S,
    figures_by_length,
)
from tests.outputs.api.serving import open_api_at

_ROLLUP = {
    "width_s": "UInt32",
    "starts_at": "Int64",
    **dict.fromkeys(
        ("agent", "engine", "model", "tenant", "input_length", "judged_by"),
        "LowCardinality(String)",
    ),
    "figure": "String",
    "place": "Int16",
    "n": "Int64",
}


# Forwarding


def _forwarding(engine: Engine, server: psutil.Process) -> None:
    """Rows/s from the end of the first batch to that of the last, and the disk of the requests."""
    with tempfile.TemporaryDirectory() as folder:
        journal = filled(Path(folder), 0)
        began_s, server_began_s = time.process_time(), sum(server.cpu_times()[:2])
        ends = forwarded(url_of(engine), journal, WITHIN_S)
        journal.dispose()
    server_s = sum(server.cpu_times()[:2]) - server_began_s
    processors_s = time.process_time() - began_s + server_s
    print_figure(
        "forwarding a journal",
        f"{rows_per_s(ends):,.0f} rows/s, "
        f"{sum(each for _, each in ends) / processors_s:,.0f} a second of processors",
    )
    print_figure("disk of a million requests of vLLM's spans", f"{mb_per_million(engine):.0f} MB")


# A month of a fleet


def _months(engine: Engine, server: psutil.Process) -> bool:
    """Whether `/api/v1/breakdown` answers a client in time, as benchmarks.rollup_months asks."""
    _fill_days(engine, list(load(SAMPLE_S, REQUESTS_PER_S)))
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


def _fill_days(engine: Engine, sample: list[JudgedRequest]) -> None:
    """Days alone: narrower rollups lie in other partitions, which such a window does not read."""
    by_length = figures_by_length(sample, DAY_S)
    rows = [
        (DAY_S, 0, "", "", "", "", length, OBJECTIVES, *each)
        for length, figures in by_length.items()
        for each in zip(
            *rows_of(FIGURES, [figures[name] for name in FIGURES], gone=False), strict=True
        )
    ]
    with engine.connect() as connection:
        client = client_of(connection)
        declared = ", ".join(f"{name} {type_name}" for name, type_name in _ROLLUP.items())
        client.command(f"CREATE TABLE one_day ({declared}) ENGINE = Memory")
        insert_rows(client, "one_day", [*_ROLLUP], [*_ROLLUP.values()], rows)
        for place in range(0, ENGINES, 20):
            client.command(_copied(place, place + 20))
        of_fleet = "width_s, starts_at, model, tenant, input_length, judged_by, figure, place"
        client.command(
            f"INSERT INTO fleet_rollups ({of_fleet}, n) SELECT {of_fleet}, sum(n) FROM rollups "
            f"GROUP BY {of_fleet} SETTINGS final = 0"
        )
        client.command("DROP TABLE one_day")


def _copied(first: int, last: int) -> str:
    names = [f"concat('{each}-', toString(e))" for each in ("agent", "chat")]
    made = {
        "starts_at": f"{TODAY} - day * {DAY_S}",
        "agent": names[0],
        "engine": names[1],
        "model": f"concat('model-', toString(e % {MODELS}))",
    }
    return (
        f"INSERT INTO rollups ({', '.join(_ROLLUP)}) "
        f"SELECT {', '.join(made.get(name, name) for name in _ROLLUP)} FROM one_day "
        f"CROSS JOIN (SELECT number AS e FROM numbers({first}, {last - first})) AS engines "
        f"CROSS JOIN (SELECT number AS day FROM numbers({DAYS + 1})) AS days"
    )


def run() -> bool:
    """Print the figures; returns whether the target holds."""
    held = True
    measures: list[Any] = [_forwarding, _months, many]
    for measure in measures:
        with opened_database() as (engine, server):
            held = measure(engine, server) is not False and held
    return held
