"""Publishing of an agent's file to PostgreSQL, relative to a bare COPY of its requests."""

import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import psycopg
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from sqlalchemy import Engine

from agent.analysis.verdicts import Judge
from agent.records.engine import EngineIdentity
from agent.settings import Settings
from agent.sources.otlp.span_reader import SpanReader
from agent.store.connection import for_writing, open_engine, without_number
from agent.store.folding import RollupStore
from agent.store.migrating import upgrade
from agent.store.publishing.changes import COLUMNS, lag_of, prepare_file
from agent.store.publishing.destination import SharedDatabase
from agent.store.publishing.publisher import Publisher
from agent.store.tables import metadata
from agent.store.transactions import request_write
from benchmarks.exports import export_body
from benchmarks.garbage import collect_like_the_agent
from tests.real_parts.postgres import PostgresServer
from tests.real_parts.waiting import eventually

TARGET = 0.5
ROUNDS = 5
EXPORTS_PER_ROUND = 80
WITHIN_S = 300.0

_COLUMNS = ", ".join(COLUMNS["requests"][1:])
_IDENTITY = EngineIdentity(engine="chat-0", model="llama")


def filled(folder: Path, number: int) -> Engine:
    """A file with the requests of many exports, and their rollups."""
    engine = open_engine(f"sqlite:///{folder / f'agent-{number}.db'}")
    upgrade(engine)
    with without_number(for_writing(engine)).begin() as connection:
        prepare_file(connection)
    objectives = Settings().all_objectives()
    reader, judge = SpanReader(lambda _: _IDENTITY, "bench"), Judge(objectives)
    write = request_write(engine)
    now = time.time()
    for place in range(EXPORTS_PER_ROUND):
        body = export_body(number * EXPORTS_PER_ROUND + place, now)
        records = reader.read(ExportTraceServiceRequest.FromString(body), now).records
        write([judge.judged(record) for record in records])
    RollupStore(engine, "bench").fold()
    return engine


def _rows(file: Engine) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(str(file.url.database))) as database:
        return database.execute(f"SELECT {_COLUMNS} FROM requests ORDER BY id").fetchall()


def _emptied(url: str) -> psycopg.Connection[Any]:
    connection = psycopg.connect(url.replace("+psycopg", ""), options="-c timezone=UTC")
    connection.execute(f"TRUNCATE {', '.join(metadata.tables)}".encode())
    connection.commit()
    connection.execute(b"CHECKPOINT")
    connection.commit()
    return connection


def _bare_copy_s(url: str, rows: Sequence[tuple[Any, ...]]) -> float:
    """Seconds of one COPY of all rows into the same table, with its indexes."""
    with _emptied(url) as connection, connection.cursor() as cursor:
        began = time.perf_counter()
        with cursor.copy(f"COPY requests ({_COLUMNS}) FROM STDIN".encode()) as copy:
            for row in rows:
                copy.write_row(row)
        connection.commit()
        return time.perf_counter() - began


def published(url: str, file: Engine, within_s: float) -> list[tuple[float, int]]:
    """Publish a whole file; returns the end of each batch and its rows.

    Ends are of `time.perf_counter`. Raises AssertionError if it takes longer than `within_s`.
    """
    shared = SharedDatabase(
        url=url, agent="bench", instance="bench:1:1", objectives=Settings().all_objectives()
    )
    ends: list[tuple[float, int]] = []
    publisher = Publisher(
        file,
        shared,
        on_published=lambda rows: ends.append((time.perf_counter(), rows)),
        on_refused=lambda rows: _unexpected(rows) if rows else None,
        on_file_failed=_unexpected,
        before_batch=lambda: None,
    )

    def is_published() -> bool:
        with file.connect() as connection:
            return lag_of(connection).rows == 0

    publisher.start()
    eventually(is_published, within_s=within_s, what="nothing that waits")
    publisher.close(within_s)
    return ends


def requests_per_s(ends: Sequence[tuple[float, int]], requests: int) -> float:
    """Requests/s from the end of the first batch, which has requests alone, to the last.

    The first batch also waits for connections and for the check of the database's revision. The
    last ones also have the rollups.
    """
    (first_at, first_rows), *_, (last_at, _) = ends
    return (requests - first_rows) / (last_at - first_at)


def _published_per_s(url: str, file: Engine, requests: int) -> float:
    _emptied(url).close()
    return requests_per_s(published(url, file, WITHIN_S), requests)


def _unexpected(what: object) -> None:
    raise AssertionError(what)


def _measured(folder: Path, url: str) -> Iterator[tuple[float, float]]:
    """Rows/s of the bare COPY and of publishing, in turns."""
    for number in range(ROUNDS):
        file = filled(folder, number)
        rows = _rows(file)
        yield len(rows) / _bare_copy_s(url, rows), _published_per_s(url, file, len(rows))
        file.dispose()


def run() -> bool:
    """Print the ratio; return whether the target is met."""
    collect_like_the_agent()
    with tempfile.TemporaryDirectory() as server_folder, tempfile.TemporaryDirectory() as folder:
        server = PostgresServer(Path(server_folder))
        try:
            with server.new_database() as url:
                shared = open_engine(url)
                upgrade(shared)
                shared.dispose()
                rates = list(_measured(Path(folder), url))
        finally:
            server.stop()
    ratio = median(by_agent / bare for bare, by_agent in rates)
    bare, by_agent = (median(each) for each in zip(*rates, strict=True))
    print(
        f"publishing to PostgreSQL: {ratio:.2f} of a bare COPY of the requests "
        f"(target at least {TARGET}); {by_agent:,.0f} rows/s of {bare:,.0f}"
    )
    return ratio >= TARGET
