"""Forwarding of a journal to PostgreSQL, relative to a bare COPY of the same rows."""

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
from agent.store.connection import for_writing, open_engine
from agent.store.journal.backlog import FORWARDED, lag_of
from agent.store.journal.destination import SharedDatabase
from agent.store.journal.forwarder import JournalForwarder
from agent.store.journal.noting import begin_run
from agent.store.migrating import upgrade
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

_COLUMNS = ", ".join(FORWARDED["requests"])
_IDENTITY = EngineIdentity(engine="chat-0", model="llama")


def filled(folder: Path, number: int) -> Engine:
    """A journal with the requests of many exports."""
    engine = open_engine(f"sqlite:///{folder / f'journal-{number}.db'}")
    upgrade(engine)
    with for_writing(engine).begin() as connection:
        begin_run(connection)
    objectives = Settings().all_objectives()
    reader, judge = SpanReader(lambda _: _IDENTITY, "bench"), Judge(objectives)
    write = request_write(engine)
    now = time.time()
    for place in range(EXPORTS_PER_ROUND):
        body = export_body(number * EXPORTS_PER_ROUND + place, now)
        records = reader.read(ExportTraceServiceRequest.FromString(body), now).records
        write([judge.judged(record) for record in records])
    return engine


def _rows(journal: Engine) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(str(journal.url.database))) as database:
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


def forwarded(url: str, journal: Engine, within_s: float) -> list[tuple[float, int]]:
    """Forward a journal until it is empty; returns the end of each batch and its notes.

    Ends are of `time.perf_counter`. Raises AssertionError where it takes longer than `within_s`.
    """
    destination = SharedDatabase(
        url=url,
        agent="bench",
        instance="bench:1:1",
        objectives=Settings().all_objectives(),
        max_series=10_000,
    )
    ends: list[tuple[float, int]] = []
    forwarder = JournalForwarder(
        journal,
        destination,
        on_forwarded=lambda notes: ends.append((time.perf_counter(), notes)),
        on_refused=_unexpected,
        on_journal_failed=_unexpected,
    )

    def is_empty() -> bool:
        with journal.connect() as connection:
            return lag_of(connection).rows == 0

    forwarder.start()
    eventually(is_empty, within_s=within_s, what="an empty journal")
    forwarder.close(within_s)
    return ends


def rows_per_s(ends: Sequence[tuple[float, int]]) -> float:
    """Rows/s from the end of the first batch to the end of the last.

    The first batch also waits for connections and for the check of the database's revision.
    """
    (first_at, _), *_, (last_at, _) = ends
    return sum(notes for _, notes in ends[1:]) / (last_at - first_at)


def _forwarded_per_s(url: str, journal: Engine) -> float:
    _emptied(url).close()
    return rows_per_s(forwarded(url, journal, WITHIN_S))


def _unexpected(what: object) -> None:
    raise AssertionError(what)


def _measured(folder: Path, url: str) -> Iterator[tuple[float, float]]:
    """Rows/s of the bare COPY and of forwarding, in turns."""
    for number in range(ROUNDS):
        journal = filled(folder, number)
        rows = _rows(journal)
        yield len(rows) / _bare_copy_s(url, rows), _forwarded_per_s(url, journal)
        journal.dispose()


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
        f"forwarding a journal to PostgreSQL: {ratio:.2f} of a bare COPY of the same rows "
        f"(target at least {TARGET}); {by_agent:,.0f} rows/s of {bare:,.0f}"
    )
    return ratio >= TARGET
