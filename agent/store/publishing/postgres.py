"""Publishes an agent's file to PostgreSQL: a batch is a transaction, which also writes its number.

So a batch is neither lost nor written twice if the response to its commit was lost.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Table, delete, event, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import SQLAlchemyError

from agent.errors import StoreUnavailable
from agent.store.claim import NameClaim
from agent.store.connection import for_writing, in_transaction, open_engine
from agent.store.migrating import require_newest, upgrade
from agent.store.minute_sums import merge_minutes
from agent.store.minutes import MinuteStore
from agent.store.objectives import ObjectiveStore
from agent.store.publishing.changes import COLUMNS, ChangedRows, Row, batch_after, file_state
from agent.store.publishing.destination import (
    STATEMENT_S,
    AgentFile,
    BatchSize,
    Published,
    SharedDatabase,
    shared_ids,
    with_shared_series,
    write_all_but_refused,
)
from agent.store.publishing.restoring import restore
from agent.store.retention import Retention
from agent.store.rollups import Series
from agent.store.tables import (
    cause_rollups,
    engine_counts,
    engine_minutes,
    engine_samples,
    events,
    gpu_samples,
    published_files,
    requests,
    rollup_series,
    rollups,
)
from agent.store.time_limits import MIGRATION_S, UPKEEP_S, cut_off_after, limit_waits

_STATEMENT_TIMEOUT = f"SET LOCAL statement_timeout = {STATEMENT_S * 1000:.0f}"
# A file that comes back after this time is published again, its samples and events twice.
_FILES_KEPT_S = 400 * 86400.0

# The rows of these tables have no key: PostgreSQL numbers them.
_KEYLESS = (engine_samples, gpu_samples, events)
# The key by which a row replaces the one that is there.
_KEYS: Mapping[str, tuple[str, ...]] = {
    requests.name: ("trace_id", "span_id", "started_at"),
    engine_minutes.name: ("agent", "engine", "starts_at"),
    engine_counts.name: ("agent", "engine", "width_s", "starts_at"),
    rollups.name: ("width_s", "series", "starts_at"),
    cause_rollups.name: ("width_s", "series", "starts_at", "objective", "limit_name", "cause"),
}
_GONE = text(
    "DELETE FROM requests USING unnest(CAST(:traces AS text[]), CAST(:spans AS text[]), "
    "CAST(:starts AS timestamptz[])) AS gone (trace_id, span_id, started_at) "
    "WHERE requests.trace_id = gone.trace_id AND requests.span_id = gone.span_id "
    "AND requests.started_at = gone.started_at"
)
_NEW_FILE = text(
    "INSERT INTO published_files (agent, file, last, at) VALUES (:agent, :file, 0, now()) "
    "ON CONFLICT (agent, file) DO NOTHING"
)
_NUMBER = text("SELECT last FROM published_files WHERE agent = :agent AND file = :file")
_LOCKED_NUMBER = text(f"{_NUMBER.text} FOR UPDATE")
_SET_NUMBER = text(
    "UPDATE published_files SET last = :last, at = now() WHERE agent = :agent AND file = :file"
)


class PostgresDestination:
    """A shared PostgreSQL; see SharedDestination."""

    idle_s = 0.5

    def __init__(self, shared: SharedDatabase, file: AgentFile) -> None:
        self._to = shared
        self._shared = for_writing(open_engine(shared.url, pool_pre_ping=False))
        cut_off_after(self._shared, shared.cut_off_s)
        event.listen(self._shared, "begin", _limit_statements)
        self._claim = NameClaim(
            shared.agent, shared.instance, state=shared.state, lag=lambda _shared: file.lag()
        )
        driver: Any = self._shared.dialect.dbapi
        self._rows = PostgresRows((driver.DataError, driver.IntegrityError))

    def prepare(self, file: AgentFile) -> None:
        """Migrate it, take the agent's name, store its objectives; see SharedDestination."""
        self._migrate()
        self._claim.take(self._shared)
        objectives = ObjectiveStore(self._shared, self._to.agent)
        objectives.write_in_force(self._to.objectives, time.time())
        with file.reading() as own:
            state = file_state(own)
        in_transaction(
            self._shared, lambda shared: shared.execute(_NEW_FILE, self._key(state.file))
        )
        with self._shared.begin() as shared:
            stored = self._locked_number(shared, state.file)
            if state.lacks(stored):
                restore(shared, file, self._to.agent, state, stored)

    def _migrate(self) -> None:
        try:
            require_newest(self._shared)
        except StoreUnavailable:
            migrating = open_engine(self._to.url, pool_pre_ping=False)
            cut_off_after(migrating, MIGRATION_S)
            try:
                upgrade(migrating)
            finally:
                migrating.dispose()

    def _key(self, file: str) -> dict[str, str]:
        return {"agent": self._to.agent, "file": file}

    def _locked_number(self, shared: Connection, file: str) -> int:
        """The number up to which the database has this file.

        Waits for an earlier transaction of this agent: the server may still commit one whose
        connection was cut off.
        """
        return int(shared.execute(_LOCKED_NUMBER, self._key(file)).scalar_one())

    def beat(self) -> None:
        """Update the agent's row in `agents`, so that no other agent takes its name."""
        self._claim.beat(self._shared)

    def release(self) -> None:
        """Give the agent's name back."""
        self._claim.release(self._shared)

    def publish(self, file: AgentFile, size: BatchSize) -> Published:
        """Write the next batch, if the database does not have everything."""
        with file.reading() as own, self._shared.begin() as shared:
            state = file_state(own)
            number = int(shared.execute(_NUMBER, self._key(state.file)).scalar_one())
            if state.last > number:
                number = self._locked_number(shared, state.file)
            batch = batch_after(own, number, size.most)
            if batch is None:
                return Published(number, is_newest=True, rows=0, refused=0)
            try:
                rows, refused = self._rows.write(shared, batch)
            except Exception:
                size.failed()
                raise
            shared.execute(_SET_NUMBER, {**self._key(batch.file), "last": batch.last})
        self._rows.stored()
        return Published(batch.last, batch.is_newest, rows, refused)

    def is_error(self, error: Exception) -> bool:
        """Whether SQLAlchemy or psycopg raised the error."""
        driver: Any = self._shared.dialect.dbapi
        return isinstance(error, (SQLAlchemyError, driver.Error))

    def disconnect(self) -> None:
        """Close the connections; the next use connects anew."""
        self._shared.dispose()


def _limit_statements(connection: Connection) -> None:
    connection.exec_driver_sql(_STATEMENT_TIMEOUT)


_Write = Callable[[Connection, Table, Sequence[Row]], None]


class PostgresRows:
    """Writes the rows of batches; those that the database refuses are left out and counted."""

    def __init__(self, refusals: tuple[type[Exception], ...]) -> None:
        """`refusals` are the driver's errors for the content of a row."""
        self._refusals = refusals
        # The highest id of a request in the file that was published: later ones are new.
        self._newest = self._newest_of_batch = 0

    def stored(self) -> None:
        """The last batch is committed."""
        self._newest = self._newest_of_batch

    def write(self, shared: Connection, batch: ChangedRows) -> tuple[int, int]:
        """Write a batch; returns how many rows it has, and how many of them were left out."""
        # Timestamps of the file are in UTC, and their text names no zone.
        shared.exec_driver_sql("SET LOCAL TIME ZONE 'UTC'")
        if deleted := batch.deleted():
            traces, spans, starts = (list(each) for each in zip(*deleted, strict=True))
            shared.execute(_GONE, {"traces": traces, "spans": spans, "starts": starts})
        refused, written = self._requests(shared, batch)
        for table in (*_KEYLESS, engine_minutes, engine_counts):
            rows = batch.rows(table)
            refused += len(
                self._write(shared, table, rows, _copy if table in _KEYLESS else _replace)
            )
            written += len(rows)
        rollups_refused, rollups_written = self._rollups(shared, batch)
        return written + rollups_written, refused + rollups_refused

    def _requests(self, shared: Connection, batch: ChangedRows) -> tuple[int, int]:
        rows = batch.rows(requests)
        # In the order in which they were stored: lists of equal rows are sorted by id.
        new = sorted((row for row in rows if row[0] > self._newest), key=itemgetter(0))
        changed = [row for row in rows if row[0] <= self._newest]
        self._newest_of_batch = max([self._newest, *(row[0] for row in new)])
        refused = self._write(shared, requests, changed, _replace)
        try:
            with shared.begin_nested():
                _copy(shared, requests, new)
        except self._refusals:
            # One is there already: another agent got the same span, or this agent was restarted.
            refused += self._write(shared, requests, new, _replace)
        return len(refused), len(rows)

    def _rollups(self, shared: Connection, batch: ChangedRows) -> tuple[int, int]:
        series = batch.series()
        ids = shared_ids(batch.file, series)
        new = [(ids[row_id], batch.file, *each) for row_id, each in series.items()]
        left_out = {row[0] for row in self._write(shared, rollup_series, sorted(new), _add_series)}
        taken = {row_id: there for row_id, there in ids.items() if there not in left_out}
        refused, written = len(left_out), 0
        for table in (rollups, cause_rollups):
            rows = with_shared_series(table, batch.rows(table), taken)
            refused += len(self._write(shared, table, rows, _replace))
            written += len(rows)
        return refused, written

    def _write(
        self, shared: Connection, table: Table, rows: Sequence[Row], write: _Write
    ) -> list[Row]:
        """Write rows, each but those that are refused. Returns the refused."""

        def write_in_savepoint(part: Sequence[Row]) -> None:
            with shared.begin_nested():
                write(shared, table, part)

        return write_all_but_refused(table.name, rows, write_in_savepoint, self._is_refusal)

    def _is_refusal(self, error: Exception) -> bool:
        return isinstance(getattr(error, "orig", error), self._refusals)


def _columns(table: Table) -> tuple[str, ...]:
    """The columns that are written: PostgreSQL gives ids of its own."""
    names = COLUMNS[table.name]
    return names[1:] if names[0] == "id" else names


def _copy(shared: Connection, table: Table, rows: Iterable[Row], into: str | None = None) -> None:
    """Copy rows by COPY, the fastest way of the driver."""
    names = _columns(table)
    first = len(COLUMNS[table.name]) - len(names)
    cursor: Any = shared.connection.cursor()
    into = into or table.name
    with cursor, cursor.copy(f"COPY {into} ({', '.join(names)}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row[first:])


def _replace(shared: Connection, table: Table, rows: Sequence[Row]) -> None:
    key, columns = _KEYS[table.name], _columns(table)
    names, into = ", ".join(columns), f"published_{table.name}"
    shared.exec_driver_sql(
        f"CREATE TEMPORARY TABLE IF NOT EXISTS {into} ON COMMIT DELETE ROWS "
        f"AS SELECT {names} FROM {table.name} WITH NO DATA"
    )
    shared.exec_driver_sql(f"TRUNCATE {into}")
    _copy(shared, table, rows, into)
    values = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in key)
    # All agents insert in one order, so that no two of them deadlock.
    shared.exec_driver_sql(
        f"INSERT INTO {table.name} ({names}) SELECT {names} FROM {into} "
        f"ORDER BY {', '.join(key)} ON CONFLICT ({', '.join(key)}) DO UPDATE SET {values}"
    )


def _add_series(shared: Connection, table: Table, rows: Sequence[Row]) -> None:
    names = ("id", "file", *Series._fields)
    values = [dict(zip(names, row, strict=True)) for row in rows]
    shared.execute(insert(table).on_conflict_do_nothing(), values)


class PostgresUpkeep:
    """The jobs of an agent on a shared PostgreSQL. Raises StoreUnavailable."""

    def __init__(
        self, url: str, agent: str, *, keep_requests_s: float, keep_rollups_s: float
    ) -> None:
        self._engine = open_engine(url, pool_pre_ping=False)
        limit_waits(self._engine, UPKEEP_S)
        self._agent = agent
        self._keep_requests_s, self._keep_rollups_s = keep_requests_s, keep_rollups_s

    def expire(self, now: float) -> None:
        """Delete old rows, and merge old minutes of the agent."""
        requests_before, rollups_before = now - self._keep_requests_s, now - self._keep_rollups_s
        Retention(self._engine).expire(requests_before, rollups_before, now)
        MinuteStore(self._engine, self._agent).expire(rollups_before)
        merge_minutes(self._engine, self._agent, now)
        old = delete(published_files).where(published_files.c.at < now - _FILES_KEPT_S)
        in_transaction(for_writing(self._engine), lambda connection: connection.execute(old))

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()
