"""Where a journal is forwarded to: what each kind of shared database does of it."""

import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from sqlalchemy import Connection, Engine

from agent.records.objective import Objective
from agent.store.agent_state import AgentState
from agent.store.connection import for_writing, in_transaction, with_words
from agent.store.journal.waiting import Lag, Run, lag_of

_LOG = logging.getLogger(__name__)

NOTES_PER_BATCH = 5000
# A slow server cancels a statement after the first; a frozen one is cut off after the second.
STATEMENT_S, CUT_OFF_S = 20.0, 30.0

Result = TypeVar("Result")


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


class JournalFile:
    """The journal that is forwarded. Raises StoreUnavailable, and tells `on_failed` why."""

    def __init__(self, engine: Engine, on_failed: Callable[[Exception], None]) -> None:
        self._reading = engine
        self._writing = for_writing(engine)
        self._on_failed = on_failed

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """One snapshot of it."""
        try:
            with self._reading.begin() as journal:
                yield journal
        except Exception as error:
            if not isinstance(getattr(error, "orig", error), sqlite3.Error):
                raise
            self._on_failed(error)
            raise with_words("the journal cannot be read", error) from error

    def write(self, work: Callable[[Connection], Result]) -> Result:
        """The result of work in a transaction of its own."""
        return in_transaction(self._writing, work)

    def lag(self) -> Lag:
        """What waits in it."""
        with self.reading() as journal:
            return lag_of(journal)


class BatchSize:
    """How many notes the next batch may have; it falls after a failure, and grows again."""

    def __init__(self, most: int) -> None:
        self._largest = most
        self.most = most

    def failed(self, notes: int) -> None:
        """Of smaller batches, each is written in time, and a bad row stands alone at last."""
        self.most = max(notes // 4, 1)

    def taken(self) -> None:
        """Grow after a batch that was written."""
        self.most = min(self.most * 4, self._largest)


class Forwarded(NamedTuple):
    """What became of a batch: its last number, how many notes it had, and whether it was taken.

    One that was refused for its content is tried again in smaller ones, until a note is alone.
    """

    last: int
    notes: int
    taken: bool = True


def log_refusal(error: Exception, notes: int) -> None:
    """Log why a shared database refuses a row, once it is alone."""
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
        """Show that the agent lives."""

    def release(self) -> None:
        """Give the agent's name back."""

    def forward(self, journal: JournalFile, run: Run, size: BatchSize) -> Forwarded:
        """Write the next batch of a run; without notes where the run was written already."""

    def is_error(self, error: Exception) -> bool:
        """Whether its driver raised an error."""

    def disconnect(self) -> None:
        """Close the connections; the next use connects anew."""
