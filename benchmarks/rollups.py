"""Rollups: adding values, a busy minute, their size beside the rows, and months of a fleet."""

import os
import random
import time
from collections.abc import Callable
from functools import partial
from resource import RUSAGE_SELF, getrusage

from sqlalchemy import Engine

from agent.analysis.quantiles import bins_of
from agent.store.connection import for_writing
from agent.store.folding import RollupStore
from agent.store.rollups import add_to_rollups
from benchmarks.rollup_load import DATABASES, TODAY, load, prepared, report
from benchmarks.rollup_months import months, use
from benchmarks.rollup_sizes import SIZE_TARGET, size
from tests.pipeline.minutes import PRICE, Minutes, timed_request
from tests.records.minutes import minute

ADD_TARGET_NS = 200
MINUTE_TARGET_S = 1.0
# A minute must be counted in less than a minute.
COUNT_TARGET_S = 60.0


def _adding() -> bool:
    seeded = random.Random(1)
    values_s = [seeded.lognormvariate(-1.6, 1.0) for _ in range(100_000)]
    times = []
    for _ in range(30):
        began = time.process_time()
        bins_of(values_s)
        times.append((time.process_time() - began) / len(values_s) * 1e9)
    return report("adding a value", min(times), ADD_TARGET_NS, "ns")


def _minute(name: str, engine: Engine) -> bool:
    """From judged requests to the folded rollups of a minute, at 1000 requests a second.

    Sixty commits, as a writer makes them, and the two folds of a minute.
    """
    clock = time.process_time
    rollup_store = RollupStore(engine, "agent-0")
    times = []
    for number in range(3):
        judged = list(load(60, 1000, TODAY + 60.0 * number))
        began = clock()
        for second in range(60):
            with for_writing(engine).begin() as connection:
                add_to_rollups(connection, judged[1000 * second : 1000 * second + 1000])
            if second % 30 == 29:
                rollup_store.fold()
        times.append(clock() - began)
    what = f"{name}: 60,000 requests of a minute, stored and folded"
    return report(what, min(times), MINUTE_TARGET_S, "s of one core")


def _again(name: str, engine: Engine) -> bool:
    """Use and cost of a minute at 1000 requests a second, with one request that lasted an hour.

    That hour has 3.6 million rows; the agent reads a bounded part of them.
    """
    minutes = Minutes(engine, PRICE)
    minutes.store.write([minute(-number, requests=60_000) for number in range(1, 61)], (), 0.0)
    minutes.read(range(0, 301, 5), running=1.0, steps=10.0, output=25_000.0, input=100_000.0)
    for second in range(240):
        minutes.take(*[timed_request(1000 * second + n, float(second), 1.0) for n in range(1000)])
    minutes.compute(211.0)
    minutes.take(timed_request(10**9, -3400.0, 3600.0))
    began = time.perf_counter()
    minutes.compute(271.0)
    taken = time.perf_counter() - began
    memory_gb = getrusage(RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"rollups, {name}: use and cost of such minutes took {memory_gb:.2g} GB of memory at most"
    )
    what = f"{name}: use and cost of a minute of 60,000 requests, one of them an hour long"
    return report(what, taken, COUNT_TARGET_S, "s")


def run() -> bool:
    """Print the figures; returns whether the targets hold."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    held = [_adding()]
    measures: list[Callable[[str, Engine], bool]] = [
        *(months, use),
        partial(size, per_s=10, target=SIZE_TARGET),
        partial(size, per_s=1, target=None),
    ]
    # Agents write to their files alone.
    of_files = [_minute, _again]
    for name, opened in DATABASES.items():
        for measure in [*(of_files if name == "SQLite" else ()), *measures]:
            with opened() as engine:
                prepared(engine)
                held.append(measure(name, engine))
    return all(held)
