"""Rollups: adding values, a busy minute, their size beside the rows, and months of a fleet."""

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from sqlalchemy import Engine, text

from agent.analysis.quantiles import bins_of, quantile
from agent.analysis.tally import tally_of
from agent.catalog.definitions import Verdict
from agent.records.objective import JudgedRequest, Judgement
from agent.records.questions import Selection, Window
from agent.records.request import RequestRecord, Status, Vantage
from agent.store.connection import for_writing, open_engine
from agent.store.keeping import Keeper
from agent.store.migrating import upgrade
from agent.store.questions import Questions
from agent.store.rollups import (
    ANY_LENGTH,
    KEEP_S,
    encoded,
    grouped,
)
from agent.store.tables import rollup_series, rollups
from agent.store.writing import request_write
from tests.real_parts.postgres import PostgresServer

ADD_TARGET_NS = 200
MINUTE_TARGET_S = 1.0
QUESTION_TARGET_S = 0.1
SIZE_TARGET = 0.02

DAY_S = 86400
TODAY = 1_795_219_200
REQUESTS_PER_S = 10
KEEP_REQUESTS_S = 7 * DAY_S
KEEP_ROLLUPS_S = 400 * DAY_S
MEASURED_S = 6 * 3600

ENGINES = 100
MODELS = 4
DAYS = 30

_JUDGEMENTS = {
    verdict: Judgement(verdict, (("chat", verdict),)) for verdict in (Verdict.MET, Verdict.MISSED)
}


def _request(number: int, ended_at: float, seeded: random.Random, engine: int = 0) -> JudgedRequest:
    """A chat request: prompts from tens to tens of thousands of tokens, answers of hundreds."""
    input_tokens = int(min(seeded.lognormvariate(7.2, 1.5), 120_000)) + 8
    output_tokens = int(seeded.lognormvariate(5.3, 0.8)) + 2
    queue_s = seeded.expovariate(100)
    ttft_s = queue_s + 0.03 + input_tokens / 20_000 * seeded.lognormvariate(0, 0.2)
    tpot_s = seeded.lognormvariate(-3.9, 0.25)
    decode_s = (output_tokens - 1) * tpot_s
    verdict = Verdict.MET if ttft_s < 0.5 else Verdict.MISSED
    record = RequestRecord(
        trace_id=f"{seeded.getrandbits(128):032x}",
        span_id=f"{seeded.getrandbits(64):016x}",
        request_id=f"chatcmpl-{seeded.getrandbits(128):032x}",
        vantage=Vantage.ENGINE,
        status=Status.OK,
        started_at=ended_at - ttft_s - decode_s,
        ended_at=ended_at,
        received_at=ended_at + 1,
        agent=f"agent-{engine}",
        engine=f"chat-{engine}",
        model=f"model-{engine % MODELS}",
        service_name=f"chat-{engine}",
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=ttft_s + decode_s,
        queue_s=queue_s,
        prefill_s=ttft_s - queue_s,
        decode_s=decode_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
    )
    return JudgedRequest(record, _JUDGEMENTS[verdict])


def _load(seconds: float, per_s: float, began: float = TODAY) -> Iterator[JudgedRequest]:
    seeded = random.Random(7)
    for number in range(int(seconds * per_s)):
        yield _request(number, began + number / per_s, seeded)


def _told(what: str, seen: float, target: float, unit: str) -> bool:
    print(f"rollups, {what}: {seen:.3g} {unit} (target {target:g})")
    return seen <= target


def _adding() -> bool:
    seeded = random.Random(1)
    values_s = [seeded.lognormvariate(-1.6, 1.0) for _ in range(100_000)]
    times = []
    for _ in range(5):
        began = time.process_time()
        bins_of(values_s)
        times.append((time.process_time() - began) / len(values_s) * 1e9)
    return _told("adding a value", min(times), ADD_TARGET_NS, "ns")


def _minute() -> bool:
    """From judged requests to the encoded rollups of the minute, at 1000 requests a second."""
    judged = list(_load(60, 1000))
    times = []
    for _ in range(3):
        began = time.process_time()
        for (_, series), tally in grouped(judged).items():
            encoded(tally, series.objectives)
        times.append(time.process_time() - began)
    return _told("60,000 requests of a minute", median(times), MINUTE_TARGET_S, "s of one core")


@contextmanager
def _sqlite() -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(f"sqlite:///{Path(folder) / 'goodput.db'}")
        yield engine
        engine.dispose()


@contextmanager
def _postgres() -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as folder:
        # The server's user must get there.
        Path(folder).chmod(0o755)
        (Path(folder) / "server").mkdir()
        server = PostgresServer(Path(folder) / "server")
        with server.new_database() as url:
            engine = open_engine(url)
            yield engine
            engine.dispose()
        server.stop()


DATABASES: dict[str, Callable[[], Any]] = {"SQLite": _sqlite, "PostgreSQL": _postgres}

_SIZES = {
    "sqlite": "SELECT sum(pgsize) FROM dbstat WHERE name IN "
    "(SELECT name FROM sqlite_master WHERE tbl_name = '{}')",
    "postgresql": "SELECT pg_total_relation_size('{}')",
}
_COMPACT = {"sqlite": "VACUUM", "postgresql": "VACUUM FULL"}


@contextmanager
def _by_itself(engine: Engine) -> Iterator[Any]:
    """A cursor of the driver, outside of any transaction."""
    connection: Any = engine.raw_connection()
    if engine.dialect.name == "postgresql":
        connection.driver_connection.autocommit = True
    cursor = connection.cursor()
    yield cursor
    cursor.close()
    connection.invalidate()


def _bytes_of(engine: Engine, table: str) -> int:
    """Of the table with its indexes, without what was deleted from it."""
    with _by_itself(engine) as cursor:
        cursor.execute(_COMPACT[engine.dialect.name])
        cursor.execute(_SIZES[engine.dialect.name].format(table))
        (size,) = cursor.fetchone()
    return int(size)


def _size(name: str, engine: Engine) -> bool:
    """What rollups take beside a week of rows, as both are kept by default, at a steady load.

    Measured over some hours. Rollups that outlive the rows come on top, and are told apart.
    """
    write = request_write(engine)
    load = _load(MEASURED_S, REQUESTS_PER_S)
    while batch := list(islice(load, 600)):
        write(batch)
    began = time.process_time()
    Keeper(engine, "agent-0").fold_rollups(TODAY + DAY_S)
    print(f"rollups, {name}: folding an hour took {(time.process_time() - began) / 6:.2f} s")
    rows_per_s = _bytes_of(engine, "requests") / MEASURED_S
    of_week = of_history = 0.0
    for width_s in (DAY_S, 3600, 60, 10):
        share = _bytes_of_width(engine, width_s) / max(MEASURED_S, width_s) / rows_per_s
        weeks = KEEP_S.get(width_s, KEEP_ROLLUPS_S) / KEEP_REQUESTS_S
        of_week += share * min(weeks, 1)
        of_history += share * max(weeks - 1, 0)
        print(f"  {width_s:>6} s: {share:.2%} of the rows of the same time")
    print(f"  history that outlives the rows: {of_history:.2%} of the rows that are kept")
    what = f"{name}: bytes beside a week of rows, {REQUESTS_PER_S} requests/s"
    return _told(what, of_week, SIZE_TARGET, "of the rows")


def _bytes_of_width(engine: Engine, width_s: int) -> int:
    """How much smaller the table is without the rollups of one width."""
    before = _bytes_of(engine, "rollups")
    with for_writing(engine).begin() as connection:
        connection.execute(text("DELETE FROM rollups WHERE width_s = :w"), {"w": width_s})
    return before - _bytes_of(engine, "rollups")


def _fill_fleet(engine: Engine) -> None:
    """Thirty days of rollups by day of a hundred engines, each at ten requests a second."""
    sample = list(_load(2000, REQUESTS_PER_S))
    share = DAY_S / 2000
    tallies = {}
    for (_, series), tally in grouped(
        JudgedRequest(item.record._replace(ended_at=TODAY), item.judgement) for item in sample
    ).items():
        for run in tally.bins.values():
            run.counts = [round(count * share) or bool(count) for count in run.counts]
        tallies[series.input_length] = (tally, series.objectives)
    everything = tally_of(sample)
    for run in everything.bins.values():
        run.counts = [round(count * share) for count in run.counts]
    tallies[ANY_LENGTH] = (everything, "chat")
    with for_writing(engine).begin() as connection:
        number = 0
        for place in range(ENGINES):
            for length, (tally, objectives) in tallies.items():
                number += 1
                connection.execute(
                    rollup_series.insert(),
                    {
                        **{"id": number, "agent": f"agent-{place}", "engine": f"chat-{place}"},
                        **{"model": f"model-{place % MODELS}", "tenant": ""},
                        **{"input_length": length, "objectives": objectives},
                    },
                )
                figures = encoded(tally, objectives)
                starts = range(TODAY - DAYS * DAY_S, TODAY, DAY_S)
                connection.execute(
                    rollups.insert(),
                    [
                        {"width_s": DAY_S, "series": number, "starts_at": start, **figures}
                        for start in starts
                    ],
                )


def _months(name: str, engine: Engine) -> bool:
    _fill_fleet(engine)
    with _by_itself(engine) as cursor:
        cursor.execute("ANALYZE")
    questions = Questions(engine)
    window = Window(from_s=TODAY - DAYS * DAY_S, until=TODAY)
    held = False
    for dimension in ("model", "input_length"):
        times = []
        for _ in range(5):
            began = time.perf_counter()
            told = questions.bins_by(dimension, "ttft_s", window, Selection())
            p99 = {value: quantile(bins, 0.99) for value, bins in told.items()}
            times.append(time.perf_counter() - began)
        assert len(p99) >= MODELS
        what = f"{name}: p99 by {dimension}, {DAYS} days of {ENGINES} engines"
        if dimension == "model":
            held = _told(what, min(times), QUESTION_TARGET_S, "s")
        else:
            print(f"rollups, {what}: {min(times):.3g} s")
    return held


def run() -> bool:
    """Print the figures; whether the targets hold."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    held = [_adding(), _minute()]
    for name, opened in DATABASES.items():
        for measure in (_size, _months):
            with opened() as engine:
                upgrade(engine)
                held.append(measure(name, engine))
    return all(held)
