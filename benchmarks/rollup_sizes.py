"""The size of rollups and minutes beside the rows of requests, and after those expire."""

import time
from itertools import islice
from math import inf
from typing import Any

from sqlalchemy import Engine, text

from agent.catalog.time_units import DAY_S, HOUR_S
from agent.records.minute import MinuteRow
from agent.store.connection import for_writing
from agent.store.folding import RollupStore
from agent.store.minute_sums import MINUTES_KEPT_S
from agent.store.minutes import MinuteStore
from agent.store.rollups import KEEP_S
from agent.store.transactions import request_write
from benchmarks.rollup_load import TODAY, by_itself, load, report
from tests.records.minutes import FACTS, minute_of
from tests.store.making import publish

SIZE_TARGET = 0.02

KEEP_REQUESTS_S = 7 * DAY_S
KEEP_ROLLUPS_S = 400 * DAY_S
MEASURED_S = 6 * HOUR_S

_SIZES = {
    "sqlite": "SELECT sum(pgsize) FROM dbstat WHERE name IN "
    "(SELECT name FROM sqlite_master WHERE tbl_name = '{}')",
    "postgresql": "SELECT pg_total_relation_size('{0}') "
    "+ coalesce(sum(pg_total_relation_size(inhrelid)), 0) "
    "FROM pg_inherits WHERE inhparent = '{0}'::regclass",
}
_COMPACT = {"sqlite": "VACUUM", "postgresql": "VACUUM FULL"}


def _bytes_of(engine: Engine, table: str) -> int:
    """The size of a table with its indexes, without deleted rows."""
    with by_itself(engine) as cursor:
        cursor.execute(_COMPACT[engine.dialect.name])
        cursor.execute(_SIZES[engine.dialect.name].format(table))
        (size,) = cursor.fetchone()
    return int(size)


def size(name: str, engine: Engine, per_s: int, target: float | None) -> bool:
    """Whether the bytes of rollups and minutes are few, relative to a week of rows.

    Some hours are measured at a steady load, and all is kept as long as by default. The first
    figure is of the same week as the rows, the second of 400 days. None is no target.
    """
    _fill(name, engine, per_s)
    rows_per_s = _bytes_of(engine, "requests") / MEASURED_S
    week_bytes = rows_per_s * KEEP_REQUESTS_S
    parts = {"series": (float(_bytes_of(engine, "rollup_series")), inf)}
    for width_s in (DAY_S, HOUR_S, 60, 10):
        bytes_per_s = _bytes_of_width(engine, width_s) / max(MEASURED_S, width_s)
        parts[f"{width_s} s"] = (bytes_per_s, KEEP_S.get(width_s, KEEP_ROLLUPS_S))
    bytes_per_minute = _bytes_of(engine, "engine_minutes") / (MEASURED_S / 60)
    parts["minutes"] = (bytes_per_minute / 60, MINUTES_KEPT_S)
    parts["minutes merged into hours"] = (bytes_per_minute / HOUR_S, KEEP_S[HOUR_S])
    parts["minutes merged into days"] = (bytes_per_minute / DAY_S, KEEP_ROLLUPS_S)
    of_week = of_all = 0.0
    for part, (bytes_per_s, kept_s) in parts.items():
        inside, whole = (
            (bytes_per_s, bytes_per_s)
            if kept_s == inf
            else (bytes_per_s * min(kept_s, KEEP_REQUESTS_S), bytes_per_s * kept_s)
        )
        of_week += inside / week_bytes
        of_all += whole / week_bytes
        print(
            f"  {part}: {inside / week_bytes:.2%} beside a week of rows, {whole / week_bytes:.2%}"
            " as long as it is kept"
        )
    what = f"{name}, {per_s} requests/s: bytes"
    goal = inf if target is None else target
    held = report(f"{what} beside a week of rows", of_week, goal, "of the rows")
    return report(f"{what} of 400 days", of_all, goal, "of a week of rows") and held


def _fill(name: str, engine: Engine, per_s: int) -> None:
    publish(engine, lambda file: _write(name, file, per_s))
    minutes = [_minute(TODAY + start) for start in range(0, MEASURED_S, 60)]
    MinuteStore(engine, "agent-0").write(minutes, (), TODAY)


def _write(name: str, file: Engine, per_s: int) -> None:
    write = request_write(file)
    requests = load(MEASURED_S, per_s)
    while batch := list(islice(requests, 600)):
        write(batch)
    began = time.process_time()
    RollupStore(file, "agent-0").fold()
    print(f"rollups, {name}: folding an hour took {(time.process_time() - began) / 6:.2f} s")


def _minute(start: int) -> MinuteRow:
    """A minute with every figure known, to as many digits as a real one has."""
    facts: dict[str, Any] = {
        name: value * 1.0123456789 if isinstance(value, float) else value
        for name, value in FACTS.items()
    }
    times = {"starts_at": start, "from_at": start + 1.0, "until": start + 61.0}
    return minute_of(facts | times)


def _bytes_of_width(engine: Engine, width_s: int) -> int:
    """The size of the rollups of one width."""
    before = _bytes_of(engine, "rollups")
    with for_writing(engine).begin() as connection:
        connection.execute(text("DELETE FROM rollups WHERE width_s = :w"), {"w": width_s})
    return before - _bytes_of(engine, "rollups")
