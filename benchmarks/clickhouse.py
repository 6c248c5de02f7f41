"""ClickHouse: forwarding to it, its disk, and the API's queries on many rows.

The engine is ClickHouse's own, from chDB in a process of its own, behind the tests' HTTP front: one
statement at a time. BENCH_CLICKHOUSE_ROWS is how many requests are made, a million by default.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import Engine, text

from agent.catalog.time_units import DAY_S
from agent.records.objective import JudgedRequest
from agent.settings import Settings
from agent.store.clickhouse.claims import server_now_us
from agent.store.clickhouse.connecting import client_of, insert_rows
from agent.store.clickhouse.vector_rows import rows_of
from agent.store.connection import open_engine
from agent.store.journal.destination import SharedDatabase
from agent.store.journal.forwarder import JournalForwarder
from agent.store.journal.waiting import lag_of
from agent.store.migrating import upgrade
from agent.store.rollups import FIGURES
from benchmarks.forwarding import filled
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
from tests.outputs.api.serving import Api, open_api_at
from tests.real_parts.clickhouse import ClickHouseServer
from tests.real_parts.waiting import eventually

ROWS = int(os.environ.get("BENCH_CLICKHOUSE_ROWS", "1000000"))
# Requests of a second: it gives the time that the rows are of.
PER_S = 1000
WITHIN_S = 3600.0

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


@contextmanager
def _database() -> Iterator[tuple[Engine, psutil.Process]]:
    with tempfile.TemporaryDirectory() as folder:
        server = ClickHouseServer(Path(folder))
        server.execute("CREATE DATABASE bench")
        engine = open_engine(server.url("bench"), statement_s=WITHIN_S)
        upgrade(engine)
        yield engine, psutil.Process(server.pid)
        engine.dispose()
        server.stop()


def _timed(server: psutil.Process, work: Callable[[], int], times: int = 5) -> tuple[float, str]:
    """The fewest seconds, and in words with the processor time of both processes together."""

    def processor_s() -> float:
        there = server.cpu_times()
        return time.process_time() + there.user + there.system

    taken = []
    for _ in range(times):
        before_s, began = processor_s(), time.perf_counter()
        assert work()
        taken.append((time.perf_counter() - began, processor_s() - before_s))
    seconds, used = (min(each) for each in zip(*taken, strict=True))
    return seconds, f"{seconds * 1e3:.0f} ms, {used * 1e3:.0f} ms of processors"


def _url(engine: Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


def _told(what: str, seen: str) -> None:
    print(f"clickhouse, {what}: {seen}")


# Forwarding


def _forwarding(engine: Engine, server: psutil.Process) -> None:
    """Rows/s from the end of the first batch to that of the last, and the disk of the requests."""
    ends: list[tuple[float, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        journal = filled(Path(folder), 0)
        forwarder = JournalForwarder(
            journal,
            SharedDatabase(
                url=_url(engine),
                agent="bench",
                instance="bench:1:1",
                objectives=Settings().all_objectives(),
                max_series=10_000,
            ),
            on_forwarded=lambda notes: ends.append((time.perf_counter(), notes)),
            on_refused=_unexpected,
            on_journal_failed=_unexpected,
        )

        def is_empty() -> bool:
            with journal.connect() as connection:
                return lag_of(connection).rows == 0

        began_s, there_s = time.process_time(), sum(server.cpu_times()[:2])
        forwarder.start()
        eventually(is_empty, within_s=WITHIN_S, what="an empty journal")
        forwarder.close(WITHIN_S)
        journal.dispose()
    (first_at, _), *_, (last_at, _) = ends
    notes = sum(notes for _, notes in ends[1:])
    processors_s = time.process_time() - began_s + sum(server.cpu_times()[:2]) - there_s
    _told(
        "forwarding a journal",
        f"{notes / (last_at - first_at):,.0f} rows/s, "
        f"{sum(each for _, each in ends) / processors_s:,.0f} a second of processors",
    )
    _told("disk of a million requests of vLLM's spans", f"{_mb_per_million(engine):.0f} MB")


def _unexpected(what: object) -> None:
    raise AssertionError(what)


def _mb_per_million(engine: Engine) -> float:
    with engine.connect() as connection:
        connection.execute(text("OPTIMIZE TABLE requests FINAL"))
        rows, size = connection.execute(
            text(
                "SELECT sum(rows), sum(bytes_on_disk) FROM system.parts "
                "WHERE active AND database = currentDatabase() AND table = 'requests'"
            )
        ).one()
    return float(size) / float(rows)


# A month of a fleet


def _months(engine: Engine, server: psutil.Process) -> bool:
    """Whether `/api/v1/breakdown` answers a client in time, as benchmarks.rollup_months asks."""
    _fill_days(engine, list(load(SAMPLE_S, REQUESTS_PER_S)))
    with open_api_at(_url(engine)) as api:
        api.agent.now = NOW

        def groups(by: str) -> int:
            found = api.get(f"/api/v1/breakdown?by={by}&window={DAYS}d").json()["groups"]
            return len(found)

        what = f"{DAYS} days of {ENGINES} engines until now, percentiles by"
        by_model_s, told = _timed(server, lambda: groups("model"))
        _told(f"{what} model", f"{told} (target {QUERY_TARGET_S * 1e3:.0f} ms)")
        _told(f"{what} input length", _timed(server, lambda: groups("input_length"))[1])
        _told(f"{what} engine", _timed(server, lambda: groups("engine"), 2)[1])
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


# Many requests


def _many(engine: Engine, server: psutil.Process) -> None:
    """Query times through the API; the rows are made inside ClickHouse."""
    began = time.perf_counter()
    until = _fill_requests(engine)
    took = time.perf_counter() - began
    _told(f"{ROWS:,} requests made inside", f"{ROWS / took:,.0f} rows/s")
    with open_api_at(_url(engine)) as api:
        api.agent.now = until
        for what, path in _asked(api):
            _told(
                f"{ROWS:,} requests, {what}", _timed(server, partial(_length_of, api, path), 3)[1]
            )
    _told("disk of a million requests made inside", f"{_mb_per_million(engine):.0f} MB")


def _asked(api: Api) -> Iterator[tuple[str, str]]:
    yield "the newest 100", "requests?limit=100"
    yield "the newest 100 slow ones of a model", "requests?limit=100&model=model-1&min_ttft_s=1"
    newest = api.query("requests", limit=1)["items"][0]["request_id"]
    yield "one by its id", f"requests/{newest}"
    yield "a minute by user", "breakdown?by=user&window=1m"
    yield "verdicts by length of an hour", "lengths?window=1h"
    yield "the worst 100 by TTFT of all", "requests?worst=ttft&limit=100"


def _length_of(api: Api, path: str) -> int:
    response = api.get(f"/api/v1/{path}")
    assert response.status_code == 200, response.text
    return len(response.content)


_MADE = {
    "id": "number",
    "trace_id": "lower(hex(MD5(toString(number))))",
    "span_id": "lower(hex(cityHash64(number)))",
    "request_id": "concat('chatcmpl-', lower(hex(MD5(toString(number + 1)))))",
    "vantage": "'engine'",
    "status": "'ok'",
    "agent": "concat('agent-', toString(number % 100))",
    "engine": "concat('chat-', toString(number % 100))",
    "model": "concat('model-', toString(number % 4))",
    "service_name": "concat('chat-', toString(number % 100))",
    "end_user": "concat('user-', toString(cityHash64(number, 1) % 500))",
    "ttft_s": "0.03 + randExponential(4)",
    "tpot_s": "randLogNormal(-3.9, 0.25)",
    "queue_s": "randExponential(100)",
    "prefill_s": "randExponential(10)",
    "decode_s": "randExponential(0.2)",
    "e2e_s": "randExponential(0.2)",
    "input_tokens": "toInt64(randLogNormal(7.2, 1.5))",
    "output_tokens": "toInt64(randLogNormal(5.3, 0.8)) + 2",
    "verdict": "if(number % 20 = 0, 'missed', 'met')",
    "verdicts": 'if(number % 20 = 0, \'{"chat": "missed"}\', \'{"chat": "met"}\')',
    "counted": "true",
}


def _fill_requests(engine: Engine) -> float:
    """Make requests up to now; returns the time of the last in Unix seconds."""
    step = 10_000_000
    with engine.connect() as connection:
        client = client_of(connection)
        until_us = server_now_us(client)
        began = (
            f"fromUnixTimestamp64Micro({until_us} - ({ROWS} - number) * {10**6 // PER_S}, 'UTC')"
        )
        made = {
            **_MADE,
            "started_at": f"{began} - toIntervalMillisecond(5000)",
            "ended_at": f"{began} - toIntervalMillisecond(number % 4000)",
            "received_at": began,
            "row_version": "1",
        }
        for first in range(0, ROWS, step):
            client.command(
                f"INSERT INTO requests ({', '.join(made)}) SELECT {', '.join(made.values())} "
                f"FROM numbers({first}, {min(step, ROWS - first)})"
            )
    return until_us / 1e6


def run() -> bool:
    """Print the figures; returns whether the target holds."""
    held = True
    measures: list[Any] = [_forwarding, _months, _many]
    for measure in measures:
        with _database() as (engine, server):
            held = measure(engine, server) is not False and held
    return held
