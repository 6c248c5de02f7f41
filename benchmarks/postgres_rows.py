"""Queries of the API on many requests in PostgreSQL, and their disk.

BENCH_POSTGRES_ROWS is how many requests are made inside the database, a million by default.
"""

import os
import time
from functools import partial

from sqlalchemy import Engine, text

from agent.store.retention import keep_partitions
from benchmarks.many_requests import PER_S, bytes_of, queries
from benchmarks.rollup_load import DATABASES, TODAY, analyse, fewest_s, prepared
from tests.outputs.api.serving import open_api_at

ROWS = int(os.environ.get("BENCH_POSTGRES_ROWS", "1000000"))
_ROWS_AT_ONCE = 500_000
_UNTIL = TODAY + 43_200.0
_SIZE = text(
    "SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree('requests') WHERE isleaf"
)


def run() -> bool:
    """Print the figures, which have no target."""
    with DATABASES["PostgreSQL"]() as engine:
        prepared(engine)
        keep_partitions(engine, 0.0, _UNTIL)
        began_s = time.perf_counter()
        _fill(engine)
        _print("made inside", f"{ROWS / (time.perf_counter() - began_s):,.0f} rows/s")
        analyse(engine)
        with engine.connect() as connection:
            size = float(connection.execute(_SIZE).scalar_one())
        _print("disk of a million", f"{size / ROWS:.0f} MB")
        with open_api_at(engine.url.render_as_string(hide_password=False)) as api:
            api.agent.now = _UNTIL
            for what, path in queries(api):
                taken_s = fewest_s(partial(bytes_of, api, path), 3)
                _print(what, f"{1000 * taken_s:,.0f} ms")
    return True


def _print(what: str, value: str) -> None:
    print(f"PostgreSQL, {ROWS:,} requests, {what}: {value}")


def _exponential(mean: float) -> str:
    return f"-{mean} * ln(1 - random())"


def _log_normal(mean: float, deviation: float) -> str:
    # The method of Box and Muller: PostgreSQL has random_normal from 16 on.
    return f"exp({mean} + {deviation} * sqrt(-2 * ln(1 - random())) * cos(2 * pi() * random()))"


_ENDED = f"to_timestamp({_UNTIL}) - ({ROWS} - n) * interval '{1 / PER_S} seconds'"
# As clickhouse_rows.py makes them.
_MADE = {
    "trace_id": "md5(n::text)",
    "span_id": "substr(md5((n + 1)::text), 1, 16)",
    "request_id": "'chatcmpl-' || md5((n + 2)::text)",
    "vantage": "'engine'",
    "status": "'ok'",
    "agent": "'agent-' || n % 100",
    "engine": "'chat-' || n % 100",
    "model": "'model-' || n % 4",
    "service_name": "'chat-' || n % 100",
    "end_user": "'user-' || floor(random() * 500)",
    "ttft_s": f"0.03 + {_exponential(1 / 4)}",
    "tpot_s": _log_normal(-3.9, 0.25),
    "queue_s": _exponential(1 / 100),
    "prefill_s": _exponential(1 / 10),
    "decode_s": _exponential(5.0),
    "e2e_s": _exponential(5.0),
    "input_tokens": _log_normal(7.2, 1.5),
    "output_tokens": f"{_log_normal(5.3, 0.8)} + 2",
    "verdict": "CASE WHEN n % 20 = 0 THEN 'missed' ELSE 'met' END",
    "verdicts": """(CASE WHEN n % 20 = 0 THEN '{"chat": "missed"}' ELSE '{"chat": "met"}' END)""",
    "counted": "true",
    "changed": "1",
    "started_at": f"{_ENDED} - interval '5 seconds'",
    "ended_at": f"{_ENDED} - n % 4000 * interval '1 millisecond'",
    "received_at": _ENDED,
}


def _fill(engine: Engine) -> None:
    statement = text(
        f"INSERT INTO requests ({', '.join(_MADE)}) SELECT {', '.join(_MADE.values())} "
        "FROM generate_series(CAST(:first AS bigint), :last) AS n"
    )
    for first in range(0, ROWS, _ROWS_AT_ONCE):
        with engine.begin() as connection:
            last = min(first + _ROWS_AT_ONCE, ROWS) - 1
            connection.execute(statement, {"first": first, "last": last})
