"""The interface of the databases that a journal is forwarded to, and what all of them use."""

import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from sqlalchemy import Connection, Engine

from agent.records.objective import Objective
from agent.store.agent_state import AgentState
from agent.store.connection import for_writing, in_transaction, store_unavailable
from agent.store.journal.backlog import Lag, Run, lag_of

_LOG = logging.getLogger(__name__)

NOTES_PER_BATCH = 5000
# A slow server cancels a statement after the first; a frozen one is cut off after the second.
STATEMENT_S, CUT_OFF_S = 20.0, 30.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDatabase:
    """The URL of the shared database, and the agent that forwards to it."""

    url: str
    agent: str
    instance: str
    objectives: Sequence[Objective]
    max_series: int
    state: AgentState = field(default_factory=AgentState)
    cut_off_s: float = CUT_OFF_S
    notes_per_batch: int = NOTES_PER_BATCH


class JournalFile:
    """The journal that is forwarded. Raises StoreUnavailable.

    `on_failed` gets each error of SQLite while the journal is read.
    """

    def __init__(self, engine: Engine, on_failed: Callable[[Exception], None]) -> None:
        self._reading = engine
        self._writing = for_writing(engine)
        self._on_failed = on_failed

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection that reads one snapshot of the journal."""
        try:
            with self._reading.begin() as journal:
                yield journal
        except Exception as error:
            if not isinstance(getattr(error, "orig", error), sqlite3.Error):
                raise
            self._on_failed(error)
            raise store_unavailable("the journal cannot be read", error) from error

    def write(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` in a transaction of its own; returns its result."""
        return in_transaction(self._writing, work)

    def lag(self) -> Lag:
        """The size and age of the backlog."""
        with self.reading() as journal:
            return lag_of(journal)


class BatchSize:
    """How many notes the next batch may have: fewer after a failure, more after a success."""

    def __init__(self, most: int) -> None:
        self._largest = most
        self.most = most

    def failed(self, notes: int) -> None:
        """Allow a quarter of the `notes` of the batch that failed.

        A slow server writes a smaller batch in time, and at last a refused row is alone in its
        batch.
        """
        self.most = max(notes // 4, 1)

    def succeeded(self) -> None:
        """Allow four times as many notes, up to the configured number."""
        self.most = min(self.most * 4, self._largest)


class Forwarded(NamedTuple):
    """The result of forwarding a batch: the number of its last note, and how many notes it had.

    `taken` is false where the database refused the content of the batch. The forwarder then tries
    smaller batches, until the refused row is alone in one.
    """

    last: int
    notes: int
    taken: bool = True


def log_refusal(error: Exception, notes: int) -> None:
    """Log why a shared database refuses a row, where the batch has only this row."""
    if notes == 1:
        _LOG.warning("the shared database refuses a row: %s", error)


class BatchDestination(Protocol):
    """A shared database. Raises the errors of its driver and SQLAlchemy's, and StoreUnavailable.

    After a batch that was not full, the next one waits for `idle_s`.
    """

    idle_s: float

    def prepare(self) -> None:
        """Migrate it, take the agent's name there, and store the agent's objectives."""

    def beat(self) -> None:
        """Update the agent's row in `agents`, so that no other agent takes its name."""

    def release(self) -> None:
        """Give the agent's name back."""

    def forward(self, journal: JournalFile, run: Run, size: BatchSize) -> Forwarded:
        """Write the next batch of a run; a result with 0 notes where all of the run is written."""

    def is_error(self, error: Exception) -> bool:
        """Whether SQLAlchemy or the database's driver raised the error."""

    def disconnect(self) -> None:
        """Close the connections; the next use connects anew."""
