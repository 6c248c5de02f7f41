"""Queries of the API on many requests in ClickHouse, which are made inside it."""

import os
import time
from functools import partial

import psutil
from sqlalchemy import Engine

from agent.store.clickhouse.claims import server_now_us
from agent.store.clickhouse.connecting import client_of
from benchmarks.clickhouse_parts import mb_per_million, print_figure, timed, url_of
from benchmarks.many_requests import PER_S, bytes_of, queries
from tests.outputs.api.serving import open_api_at

ROWS = int(os.environ.get("BENCH_CLICKHOUSE_ROWS", "1000000"))


def many(engine: Engine, server: psutil.Process) -> None:
    """Query times through the API; the rows are made inside ClickHouse."""
    began = time.perf_counter()
    until = _fill_requests(engine)
    took = time.perf_counter() - began
    print_figure(f"{ROWS:,} requests made inside", f"{ROWS / took:,.0f} rows/s")
    with open_api_at(url_of(engine)) as api:
        api.agent.now = until
        for what, path in queries(api):
            print_figure(
                f"{ROWS:,} requests, {what}", timed(server, partial(bytes_of, api, path), 3)[1]
            )
    print_figure("disk of a million requests made inside", f"{mb_per_million(engine):.0f} MB")


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
            "changed": "1",
        }
        for first in range(0, ROWS, step):
            client.command(
                f"INSERT INTO requests ({', '.join(made)}) SELECT {', '.join(made.values())} "
                f"FROM numbers({first}, {min(step, ROWS - first)})"
            )
    return until_us / 1e6
