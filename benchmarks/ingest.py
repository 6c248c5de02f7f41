"""Ingest from OTLP bytes to committed rows, relative to parsing and inserting alone."""

import asyncio
import os
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agent.analysis.verdicts import Judge
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.request_pipeline import RequestPipeline
from agent.records.engine import EngineIdentity
from agent.settings import Settings
from agent.sources.otlp.payload import Body
from agent.sources.otlp.receiver import Receiver
from agent.sources.otlp.span_reader import SpanReader
from agent.store.connection import open_engine
from agent.store.inserting import sqlite_insert
from agent.store.migrating import upgrade
from agent.store.rows import COLUMNS, sqlite_rows
from agent.store.transactions import request_write
from agent.store.writing import RequestWriter
from benchmarks.exports import SPANS_PER_EXPORT, export_body
from benchmarks.garbage import collect_like_the_agent

TARGET = 0.4
ROUNDS = 15
EXPORTS_PER_ROUND = 16

IDENTITY = EngineIdentity(engine="chat-0", model="llama")


class Bound:
    """The least work of any receiver: parse the bodies, insert the rows, commit each batch."""

    def __init__(self, folder: Path) -> None:
        path = folder / "bound.db"
        engine = open_engine(f"sqlite:///{path}")
        upgrade(engine)
        engine.dispose()
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("PRAGMA synchronous=FULL")
        self._reader = SpanReader(lambda _: IDENTITY, "bench")
        self._judge = Judge(Settings().all_objectives())

    def seconds(self, bodies: Sequence[bytes]) -> float:
        """Return the seconds for all bodies, without making the rows."""
        batches = [self._rows(body) for body in bodies]
        began = time.perf_counter()
        for body, rows in zip(bodies, batches, strict=True):
            ExportTraceServiceRequest.FromString(body)
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(sqlite_insert(COLUMNS, 1), rows)
            self._connection.execute("COMMIT")
        return time.perf_counter() - began

    def _rows(self, body: bytes) -> list[tuple[object, ...]]:
        message = ExportTraceServiceRequest.FromString(body)
        records = self._reader.read(message, time.time()).records
        return sqlite_rows([self._judge.judged(record) for record in records])


class Intake:
    """The agent's whole intake, from the bytes to the acknowledgement."""

    def __init__(self, folder: Path) -> None:
        engine = open_engine(f"sqlite:///{folder / 'agent.db'}")
        upgrade(engine)
        objectives = Settings().all_objectives()
        self.meter = Meter(objectives, ["chat-0"])
        self.writer = RequestWriter(request_write(engine))
        pipeline = RequestPipeline(Judge(objectives), self.writer, self.meter)
        reader = SpanReader(lambda _: IDENTITY, "bench")
        self.receiver = Receiver(reader, pipeline.accept, _forward_nothing, self.meter, time.time)

    async def seconds(self, bodies: Sequence[bytes], senders: int) -> float:
        """Return the seconds until all bodies are acknowledged, `senders` at a time."""
        waiting = iter(bodies)

        async def send() -> None:
            for body in waiting:
                await self.receiver.take(Body(body))

        began = time.perf_counter()
        await asyncio.gather(*(send() for _ in range(senders)))
        return time.perf_counter() - began


def _forward_nothing(_body: Body) -> None:
    """Do nothing: no destination is configured."""


async def _measure(folder: Path, senders: int) -> list[float]:
    bound, intake = Bound(folder), Intake(folder)
    collect_like_the_agent()
    ratios = []
    for round_number in range(ROUNDS):
        first = round_number * EXPORTS_PER_ROUND
        now = time.time()
        bodies = [export_body(first + place, now) for place in range(EXPORTS_PER_ROUND)]
        bound_s = bound.seconds(bodies)
        ratios.append(bound_s / await intake.seconds(bodies, senders))
    intake.writer.close()
    return ratios


def run() -> bool:
    """Print the ratios; return whether the target is met."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    met = True
    for senders in (1, 4):
        with tempfile.TemporaryDirectory() as folder:
            ratio = median(asyncio.run(_measure(Path(folder), senders)))
        met = met and ratio >= TARGET
        print(
            f"ingest, {senders} sender(s), batches of {SPANS_PER_EXPORT}, one core: "
            f"{ratio:.2f} of the speed of parse + raw executemany (target at least {TARGET})"
        )
    return met
