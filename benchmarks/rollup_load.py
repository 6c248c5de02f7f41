"""Parts of the benchmarks of rollups: requests, databases, times, and printing a figure."""

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, text

from agent.catalog.definitions import Verdict
from agent.records.objective import JudgedRequest, Judgement
from agent.records.request import RequestRecord, Status, Vantage
from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from tests.real_parts.postgres import PostgresServer

TODAY = 1_795_219_200
MODELS = 4

_JUDGEMENTS = {
    verdict: Judgement(verdict, (("chat", verdict),)) for verdict in (Verdict.MET, Verdict.MISSED)
}


def request(number: int, ended_at: float, seeded: random.Random, engine: int = 0) -> JudgedRequest:
    """A chat request: prompts of tens to tens of thousands of tokens, responses of hundreds."""
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


def load(seconds: float, per_s: float, began: float = TODAY) -> Iterator[JudgedRequest]:
    """Requests that end one after the other, the same every time."""
    seeded = random.Random(7)
    for number in range(int(seconds * per_s)):
        yield request(number, began + number / per_s, seeded)


def report(what: str, value: float, target: float, unit: str) -> bool:
    """Print a figure; returns whether its target holds."""
    print(f"rollups, {what}: {value:.3g} {unit} (target {target:g})")
    return value <= target


def fewest_s(work: Callable[[], object], times: int = 5) -> float:
    """The fewest seconds of some runs, each of which must return something."""
    taken_s = []
    for _ in range(times):
        began_s = time.perf_counter()
        assert work()
        taken_s.append(time.perf_counter() - began_s)
    return min(taken_s)


@contextmanager
def _sqlite() -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(f"sqlite:///{Path(folder) / 'goodput.db'}")
        yield engine
        engine.dispose()


@contextmanager
def _postgres() -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as folder:
        # The server's user must be able to open it.
        Path(folder).chmod(0o755)
        (Path(folder) / "server").mkdir()
        server = PostgresServer(Path(folder) / "server")
        with server.new_database() as url:
            engine = open_engine(url)
            yield engine
            engine.dispose()
        server.stop()


def prepared(engine: Engine) -> None:
    """Migrate a database; PostgreSQL numbers what is written there as an agent's file does."""
    upgrade(engine)
    if engine.dialect.name == "postgresql":
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO publishing VALUES ('', 1, 0, now())"))


DATABASES: dict[str, Callable[[], Any]] = {"SQLite": _sqlite, "PostgreSQL": _postgres}


@contextmanager
def by_itself(engine: Engine) -> Iterator[Any]:
    """A cursor of the driver, outside of any transaction."""
    connection: Any = engine.raw_connection()
    if engine.dialect.name == "postgresql":
        connection.driver_connection.autocommit = True
    cursor = connection.cursor()
    yield cursor
    cursor.close()
    connection.invalidate()


def analyse(engine: Engine) -> None:
    """Refresh the statistics of the database's planner."""
    with by_itself(engine) as cursor:
        cursor.execute("ANALYZE")
