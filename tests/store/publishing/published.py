"""An agent's file that is published to a shared PostgreSQL."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from agent.records.objective import Objective
from agent.store.connection import for_writing, without_number
from agent.store.publishing.changes import lag_of, prepare_file
from agent.store.publishing.destination import ROWS_PER_BATCH, SharedDatabase
from agent.store.publishing.publisher import Publisher
from tests.real_parts.waiting import eventually
from tests.store.making import WITHIN_S, fold
from tests.store.migrated import migrated
from tests.store.views import CHAT

CUT_OFF_S = 2.0


@contextmanager
def file_in(folder: Path, name: str = "agent.db") -> Iterator[Engine]:
    """A new file of an agent that publishes it."""
    with migrated(f"sqlite:///{folder / name}") as engine:
        opened(engine)
        yield engine


def opened(file: Engine) -> None:
    """What a start of the agent does with the file."""
    with without_number(for_writing(file)).begin() as connection:
        prepare_file(connection)


@dataclass
class Publishing:
    """A publisher of a file, and what its callbacks got."""

    file: Engine
    url: str
    agent: str = "agent-0"
    rows_per_batch: int = ROWS_PER_BATCH
    cut_off_s: float = CUT_OFF_S
    published: int = 0
    refused: int = 0
    given_way: int = 0
    failures: list[Exception] = field(default_factory=list)
    objectives: tuple[Objective, ...] = (CHAT,)

    def __post_init__(self) -> None:
        self.publisher = Publisher(
            self.file,
            SharedDatabase(
                url=self.url,
                agent=self.agent,
                instance=f"elsewhere:1:{id(self)}",
                objectives=self.objectives,
                cut_off_s=self.cut_off_s,
                rows_per_batch=self.rows_per_batch,
            ),
            on_published=self._on_published,
            on_refused=self._on_refused,
            on_file_failed=self.failures.append,
            before_batch=self._give_way,
        )

    def _on_published(self, rows: int) -> None:
        self.published += rows

    def _give_way(self) -> None:
        self.given_way += 1

    def _on_refused(self, rows: int) -> None:
        self.refused += rows

    def waiting(self) -> int:
        """How many rows wait."""
        with self.file.connect() as connection:
            return lag_of(connection).rows

    def all_published(self) -> None:
        """Fold, and wait until nothing waits."""
        fold(self.file)
        eventually(lambda: self.waiting() == 0, within_s=WITHIN_S, what="nothing that waits")


@contextmanager
def publishing(file: Engine, url: str, **given: Any) -> Iterator[Publishing]:
    """A running publisher; at the end everything is published."""
    made = Publishing(file, url, **given)
    made.publisher.start()
    try:
        yield made
        made.all_published()
    finally:
        made.publisher.close(WITHIN_S)
