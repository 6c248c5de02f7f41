"""Forwards a journal to PostgreSQL: each batch is a transaction, which also writes its mark."""

import time
from functools import partial
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.exc import SQLAlchemyError

from agent.errors import StoreUnavailable
from agent.store.claim import NameClaim
from agent.store.connection import for_writing, in_transaction, open_engine
from agent.store.journal.backlog import Lag, NotedRows, Run, batch_after
from agent.store.journal.cutting_off import cut_off_after
from agent.store.journal.destination import (
    STATEMENT_S,
    BatchSize,
    Forwarded,
    JournalFile,
    SharedDatabase,
    log_refusal,
)
from agent.store.journal.shared_rows import begin_mark, locked_mark, set_mark, write_batch
from agent.store.migrating import require_newest, upgrade
from agent.store.objectives import ObjectiveStore
from agent.store.time_limits import MIGRATION_S

_STATEMENT_TIMEOUT = f"SET LOCAL statement_timeout = {STATEMENT_S * 1000:.0f}"


class PostgresDestination:
    """A shared PostgreSQL; see BatchDestination."""

    idle_s = 0.5

    def __init__(self, destination: SharedDatabase, journal: JournalFile) -> None:
        self._to = destination
        self._shared = for_writing(open_engine(destination.url, pool_pre_ping=False))
        cut_off_after(self._shared, destination.cut_off_s)
        event.listen(self._shared, "begin", _limit_statements)

        def lag(_shared: Connection) -> Lag:
            return journal.lag()

        self._claim = NameClaim(
            destination.agent, destination.instance, state=destination.state, lag=lag
        )
        self._known_runs: set[str] = set()

    def prepare(self) -> None:
        """Migrate it, take the agent's name there, and store the agent's objectives."""
        self._migrate()
        self._claim.take(self._shared)
        objectives = ObjectiveStore(self._shared, self._to.agent)
        objectives.write_in_force(self._to.objectives, time.time())

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

    def beat(self) -> None:
        """Update the agent's row in `agents`, so that no other agent takes its name."""
        self._claim.beat(self._shared)

    def release(self) -> None:
        """Give the agent's name back."""
        self._claim.release(self._shared)

    def forward(self, journal: JournalFile, run: Run, size: BatchSize) -> Forwarded:
        """Write the next batch of a run; a result with 0 notes where all of the run is written."""
        if run.id not in self._known_runs:
            mark_of = partial(begin_mark, run=run.id, agent=self._to.agent)
            in_transaction(self._shared, mark_of)
            self._known_runs.add(run.id)
        with journal.reading() as own, self._shared.begin() as shared:
            mark = locked_mark(shared, run.id)
            batch = batch_after(own, run, mark, size.most)
            if batch is None:
                return Forwarded(mark, 0)
            taken = self._written(shared, batch, size)
            if taken or batch.notes == 1:
                set_mark(shared, run.id, batch.last)
        return Forwarded(batch.last, batch.notes, taken)

    def _written(self, shared: Connection, batch: NotedRows, size: BatchSize) -> bool:
        """Write a batch; returns False where its content is refused."""
        driver: Any = self._shared.dialect.dbapi
        content_errors = (driver.DataError, driver.IntegrityError)
        try:
            with shared.begin_nested():
                write_batch(shared, batch, self._to.max_series)
        except Exception as error:
            size.failed(batch.notes)
            if not isinstance(getattr(error, "orig", error), content_errors):
                raise
            log_refusal(error, batch.notes)
            return False
        return True

    def is_error(self, error: Exception) -> bool:
        """Whether SQLAlchemy or psycopg raised the error."""
        driver: Any = self._shared.dialect.dbapi
        return isinstance(error, (SQLAlchemyError, driver.Error))

    def disconnect(self) -> None:
        """Close the connections; the next use connects anew."""
        self._known_runs.clear()
        self._shared.dispose()


def _limit_statements(connection: Connection) -> None:
    connection.exec_driver_sql(_STATEMENT_TIMEOUT)
