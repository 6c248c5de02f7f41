"""Expiring a day of ten million requests on PostgreSQL, where a partition is dropped."""

import os
import time
from pathlib import Path

from sqlalchemy import Engine, text

from agent.catalog.time_units import DAY_S
from agent.store.retention import Retention, keep_partitions
from benchmarks.rollup_load import DATABASES, TODAY, prepared, report
from tests.store.making import request, store_in

ROWS = 10_000_000
_ROWS_AT_ONCE = 500_000
TARGET_S = 1.0


def run() -> bool:
    """Print the figure; return whether the target is met."""
    with DATABASES["PostgreSQL"]() as engine:
        prepared(engine)
        keep_partitions(engine, 0.0, TODAY)
        store_in(engine, [request(0, started_at=TODAY, ended_at=TODAY + 1.0)])
        _fill(engine)
        _drop_page_cache(engine)
        began_s = time.perf_counter()
        Retention(engine).expire(TODAY + DAY_S, 0.0, TODAY + DAY_S)
        took_s = time.perf_counter() - began_s
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM requests")) == 0
    return report(f"PostgreSQL: expiring a day of {ROWS:,} requests", took_s, TARGET_S, "s")


def _drop_page_cache(engine: Engine) -> None:
    """Write the database's files to the disk, and drop them from the kernel's page cache.

    Rows that expire are weeks old, so the page cache no longer has them.
    """
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("CHECKPOINT"))
        folder = Path(connection.execute(text("SHOW data_directory")).scalar_one())
    for path in (folder / "base").rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def _fill(engine: Engine) -> None:
    """Copies of one request under other ids, spread over its day."""
    with engine.connect() as connection:
        row = connection.execute(text("SELECT * FROM requests")).mappings().one()
    others = [
        name for name in row if name not in ("id", "trace_id", "span_id", "started_at", "ended_at")
    ]
    columns = ", ".join(others)
    for first in range(1, ROWS, _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, ROWS) - 1
        with engine.begin() as connection:
            connection.execute(
                text(
                    f"INSERT INTO requests (trace_id, span_id, started_at, ended_at, {columns}) "
                    "SELECT lpad(to_hex(n), 32, '0'), lpad(to_hex(n), 16, '0'), "
                    "started_at + n * interval '8 milliseconds', "
                    f"ended_at + n * interval '8 milliseconds', {columns} "
                    "FROM requests, generate_series(CAST(:first AS bigint), :last) AS n "
                    "WHERE id = :row"
                ),
                {"first": first, "last": last, "row": row["id"]},
            )
