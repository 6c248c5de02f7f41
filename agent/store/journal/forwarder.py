"""Forwards a journal to the shared database in a thread of its own, batch after batch."""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import SQLAlchemyError

from agent.errors import StoreUnavailable
from agent.records.objective import Objective
from agent.store.agent_state import AgentState
from agent.store.claim import BEAT_EVERY_S, NameClaim
from agent.store.connection import for_writing, in_transaction, open_engine, with_words
from agent.store.journal.cutting_off import cut_off_after
from agent.store.journal.shared_rows import begin_mark, locked_mark, set_mark, write_batch
from agent.store.journal.waiting import (
    Lag,
    NotedRows,
    Run,
    batch_after,
    forget,
    forget_run,
    has_notes,
    lag_of,
    runs_of,
)
from agent.store.migrating import require_newest, upgrade
from agent.store.objectives import ObjectiveStore
from agent.store.time_limits import MIGRATION_S

_LOG = logging.getLogger(__name__)

NOTES_PER_BATCH = 5000
IDLE_S = 0.5
# After a failure, the wait doubles from the first up to the last.
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 10.0
# A slow server cancels a statement after the first; a frozen one is cut off after the second.
STATEMENT_S, CUT_OFF_S = 20.0, 30.0

_AWAY = "the shared database cannot be reached"
_STATEMENT_TIMEOUT = f"SET LOCAL statement_timeout = {STATEMENT_S * 1000:.0f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDatabase:
    """The shared database, and the agent that forwards to it."""

    url: str
    agent: str
    instance: str
    objectives: Sequence[Objective]
    max_series: int
    state: AgentState = field(default_factory=AgentState)
    cut_off_s: float = CUT_OFF_S
    notes_per_batch: int = NOTES_PER_BATCH


class JournalForwarder:
    """Forwards what waits in a journal, in order; what is committed there is forgotten here.

    Where the journal or the shared database is away it tries again, later and later. A row that the
    shared database refuses for its content is left out. `on_forwarded` and `on_refused` get numbers
    of notes.
    """

    def __init__(
        self,
        journal: Engine,
        destination: SharedDatabase,
        *,
        on_forwarded: Callable[[int], None],
        on_refused: Callable[[int], None],
        on_journal_failed: Callable[[Exception], None],
    ) -> None:
        self._journal = for_writing(journal)
        self._reading = journal
        self._to = destination
        self._on_forwarded = on_forwarded
        self._on_refused = on_refused
        self._on_journal_failed = on_journal_failed
        self._shared = for_writing(open_engine(destination.url, pool_pre_ping=False))
        cut_off_after(self._shared, destination.cut_off_s)
        event.listen(self._shared, "begin", _limit_statements)
        self._claim = NameClaim(
            destination.agent,
            destination.instance,
            state=destination.state,
            lag=lambda _shared: self._lag(),
        )
        self._known_runs: set[str] = set()
        self._ready = False
        self._beaten_at = 0.0
        self._most = destination.notes_per_batch
        self._problem: str | None = "the shared database was not asked yet"
        self._problem_since = time.monotonic()
        self._failures = 0
        self._behind = True
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="journal-forwarder", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def keeps_up(self) -> bool:
        """Whether the shared database had everything a moment ago."""
        return self._problem is None and not self._behind

    def problem(self) -> str | None:
        """Why nothing is forwarded and since when, in words; None while it works."""
        problem = self._problem
        if problem is None:
            return None
        return f"{problem} (since {time.monotonic() - self._problem_since:.0f} s)"

    def close(self, within_s: float) -> None:
        """Forward the next batch if the shared database is there, give the name back, and end."""
        self._stopping.set()
        self._thread.join(within_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._stopping.wait(self._worked())
        if self._problem is None:
            self._worked()
            with suppress(StoreUnavailable):
                self._claim.release(self._shared)
        self._shared.dispose()

    def _worked(self) -> float:
        """Forward a batch; returns the seconds to wait before the next."""
        try:
            with self._as_unavailable():
                self._behind = self._forwarded()
        except StoreUnavailable as error:
            return self._failed(error)
        if self._problem is not None:
            _LOG.info("the journal is forwarded to the shared database")
        self._problem, self._failures = None, 0
        return 0.0 if self._behind else IDLE_S

    def _failed(self, error: StoreUnavailable) -> float:
        if not self._failures:
            _LOG.warning("what is stored waits in the journal: %s", error)
        if self._problem is None:
            self._problem_since = time.monotonic()
        self._problem = error.public
        self._ready, self._behind = False, True
        self._known_runs.clear()
        self._shared.dispose()
        self._failures += 1
        return min(FIRST_WAIT_S * 2.0 ** min(self._failures - 1, 16), LONGEST_WAIT_S)

    @contextmanager
    def _as_unavailable(self) -> Iterator[None]:
        """Raise StoreUnavailable for any other error: the thread must go on."""
        driver: Any = self._shared.dialect.dbapi
        try:
            yield
        except StoreUnavailable:
            raise
        except Exception as error:
            if not isinstance(error, (SQLAlchemyError, driver.Error)):
                _LOG.exception("a batch of the journal could not be forwarded")
            raise with_words(_AWAY, error) from error

    def _forwarded(self) -> bool:
        """Forward a batch of the oldest run that has one; returns whether there may be more."""
        self._make_ready()
        with self._of_journal() as journal:
            runs = runs_of(journal)
            filled = [run for run in runs if has_notes(journal, run)]
        for run in runs[:-1]:
            if run not in filled:
                in_transaction(self._journal, partial(forget_run, run=run))
        if filled:
            self._forward(filled[0])
        return bool(filled)

    def _make_ready(self) -> None:
        if not self._ready:
            self._migrate()
            self._claim.take(self._shared)
            objectives = ObjectiveStore(self._shared, self._to.agent)
            objectives.write_in_force(self._to.objectives, time.time())
            self._ready = True
        elif time.monotonic() - self._beaten_at < BEAT_EVERY_S:
            return
        self._claim.beat(self._shared)
        self._beaten_at = time.monotonic()

    def _lag(self) -> Lag:
        with self._of_journal() as journal:
            return lag_of(journal)

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

    def _forward(self, run: Run) -> None:
        """Forward a batch of a run."""
        if run.id not in self._known_runs:
            mark_of = partial(begin_mark, run=run.id, agent=self._to.agent)
            in_transaction(self._shared, mark_of)
            self._known_runs.add(run.id)
        with self._of_journal() as journal, self._shared.begin() as shared:
            mark = locked_mark(shared, run.id)
            batch = batch_after(journal, run, mark, self._most)
            if batch is not None:
                taken = self._written(shared, batch)
                if taken or batch.notes == 1:
                    set_mark(shared, run.id, batch.last)
        if batch is None:
            # It was written, and the agent ended before it forgot it.
            in_transaction(self._journal, partial(forget, run=run, last=mark))
        else:
            self._count(batch, run, taken=taken)

    def _written(self, shared: Connection, batch: NotedRows) -> bool:
        """Write a batch; returns False where its content is refused."""
        driver: Any = self._shared.dialect.dbapi
        of_content = (driver.DataError, driver.IntegrityError)
        try:
            with shared.begin_nested():
                write_batch(shared, batch, self._to.max_series)
        except Exception as error:
            # Of smaller batches, each is written in time, and a bad row stands alone at last.
            self._most = max(batch.notes // 4, 1)
            if not isinstance(getattr(error, "orig", error), of_content):
                raise
            if batch.notes == 1:
                _LOG.warning("the shared database refuses a row: %s", error)
            return False
        return True

    def _count(self, batch: NotedRows, run: Run, *, taken: bool) -> None:
        """Go on after a batch that is committed, or with a smaller one until a bad row is alone."""
        if not taken and batch.notes > 1:
            return
        in_transaction(self._journal, partial(forget, run=run, last=batch.last))
        if taken:
            self._most = min(self._most * 4, self._to.notes_per_batch)
            self._on_forwarded(batch.notes)
        else:
            self._on_refused(batch.notes)

    @contextmanager
    def _of_journal(self) -> Iterator[Connection]:
        try:
            with self._reading.begin() as journal:
                yield journal
        except Exception as error:
            if not isinstance(getattr(error, "orig", error), sqlite3.Error):
                raise
            self._on_journal_failed(error)
            raise with_words("the journal cannot be read", error) from error


def _limit_statements(connection: Connection) -> None:
    connection.exec_driver_sql(_STATEMENT_TIMEOUT)
