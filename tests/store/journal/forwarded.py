"""A journal that is forwarded to a shared PostgreSQL."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from agent.records.objective import Objective
from agent.store.connection import for_writing
from agent.store.journal.backlog import lag_of
from agent.store.journal.destination import NOTES_PER_BATCH, SharedDatabase
from agent.store.journal.forwarder import JournalForwarder
from agent.store.journal.noting import begin_run
from tests.real_parts.waiting import eventually
from tests.store.making import WITHIN_S
from tests.store.migrated import migrated
from tests.store.views import CHAT

CUT_OFF_S = 2.0


@contextmanager
def journal_in(folder: Path, name: str = "journal.db") -> Iterator[Engine]:
    """A new journal."""
    with migrated(f"sqlite:///{folder / name}") as engine:
        new_run(engine)
        yield engine


def new_run(journal: Engine) -> None:
    """Begin a run, as each start of an agent does."""
    with for_writing(journal).begin() as connection:
        begin_run(connection)


@dataclass
class Forwarding:
    """A forwarder of a journal, and what its callbacks got."""

    journal: Engine
    url: str
    agent: str = "agent-0"
    notes_per_batch: int = NOTES_PER_BATCH
    cut_off_s: float = CUT_OFF_S
    forwarded: int = 0
    refused: int = 0
    given_way: int = 0
    failures: list[Exception] = field(default_factory=list)
    objectives: tuple[Objective, ...] = (CHAT,)

    def __post_init__(self) -> None:
        self.forwarder = JournalForwarder(
            self.journal,
            SharedDatabase(
                url=self.url,
                agent=self.agent,
                instance=f"elsewhere:1:{id(self)}",
                objectives=self.objectives,
                max_series=10_000,
                cut_off_s=self.cut_off_s,
                notes_per_batch=self.notes_per_batch,
            ),
            on_forwarded=self._on_forwarded,
            on_refused=self._on_refused,
            on_journal_failed=self.failures.append,
            give_way=self._give_way,
        )

    def _on_forwarded(self, notes: int) -> None:
        self.forwarded += notes

    def _give_way(self) -> None:
        self.given_way += 1

    def _on_refused(self, notes: int) -> None:
        self.refused += notes

    def waiting(self) -> int:
        """How many changes wait."""
        with self.journal.connect() as connection:
            return lag_of(connection).rows

    def all_forwarded(self) -> None:
        """Wait until nothing waits."""
        eventually(lambda: self.waiting() == 0, within_s=WITHIN_S, what="an empty journal")


@contextmanager
def forwarding(journal: Engine, url: str, **given: Any) -> Iterator[Forwarding]:
    """A running forwarder; at the end all was forwarded."""
    made = Forwarding(journal, url, **given)
    made.forwarder.start()
    try:
        yield made
        made.all_forwarded()
    finally:
        made.forwarder.close(WITHIN_S)
