"""Agents' files that are published to a shared database, and what both have."""

import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, Table, select

from agent.records.objective import Objective
from agent.store.connection import for_writing, without_number
from agent.store.minutes import MinuteStore
from agent.store.observations import ObservationStore
from agent.store.publishing.changes import lag_of, prepare_file
from agent.store.publishing.destination import ROWS_PER_BATCH, SharedDatabase
from agent.store.publishing.publisher import Publisher
from agent.store.rollup_queries import BINARY
from agent.store.rollups import FIGURES, RollupSum, Series
from agent.store.tables import (
    engine_minutes,
    engine_samples,
    events,
    gpu_samples,
    requests,
    rollup_series,
    rollups,
)
from tests.real_parts.waiting import eventually
from tests.records.minutes import minute
from tests.store.explaining import summed_causes
from tests.store.making import (
    NOON,
    WITHIN_S,
    RollupPlace,
    counted_rollups,
    counted_rows,
    engine_sample,
    fold,
    gpu_sample,
    restart,
    rollup_bytes,
    some,
    store,
)
from tests.store.migrated import migrated
from tests.store.views import CHAT

CUT_OFF_S = 2.0
PUBLISHED = (requests, engine_samples, gpu_samples, events, engine_minutes)


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


def stored(engine: Engine, table: Table) -> Sequence[dict[str, Any]]:
    """All rows of a table, without the numbers that each database gives."""
    names = [column.name for column in table.c if column.name != "id"]
    with engine.connect() as connection:
        found = connection.execute(select(*(table.c[name] for name in names))).mappings()
        return sorted(({name: row[name] for name in names} for row in found), key=str)


def summed(shared: Engine) -> dict[RollupPlace, tuple[bytes | None, ...]]:
    """The rollups of a database that have requests; series of several files are added up."""
    if shared.dialect.name != "clickhousedb":
        return rollup_bytes(shared)
    figures = [rollups.c[name] for name in FIGURES]
    query = select(rollups.c.width_s, rollups.c.starts_at, rollups.c.series, *figures)
    names = [rollup_series.c[name] for name in Series._fields]
    sums: dict[tuple[Any, ...], RollupSum] = defaultdict(RollupSum)
    with shared.connect() as connection:
        found = connection.execute(select(rollup_series.c.id, *names))
        series = {row_id: tuple(rest) for row_id, *rest in found}
        for width_s, starts_at, row_id, *vectors in connection.execute(
            query, execution_options=BINARY
        ):
            place = (width_s, starts_at, *series[row_id])
            sums[place].add(place[-1], vectors)
    return {
        place: tuple(each.figures(place[-1])[name] for name in FIGURES)
        for place, each in sums.items()
        if each.tally().requests
    }


def same_in_both(file: Engine, shared: Engine) -> None:
    """Rows, rollups and causes are equal, and the rollups are the sums of the rows."""
    for table in PUBLISHED:
        assert stored(file, table) == stored(shared, table), table.name
    assert summed(shared) == rollup_bytes(file)
    assert counted_rollups(file) == counted_rows(file)
    assert summed_causes(shared) == summed_causes(file)


def store_every_kind(file: Engine, **given: Any) -> list[int]:
    """Store rows of every kind; returns how many of each."""
    store(file, some(range(20), **given))
    observations = ObservationStore(file, "agent-0")
    observations.write_engine_sample(engine_sample(NOON))
    observations.write_gpu_samples([gpu_sample(NOON), gpu_sample(NOON + 1)])
    observations.write_event(restart(NOON))
    MinuteStore(file, "agent-0").write([minute()], (), NOON)
    return [20, 1, 2, 1, 1]


def copied(file: Engine) -> Path:
    """A backup of the file."""
    path = Path(str(file.url.database))
    backup = path.with_name("backup.db")
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(backup)) as copy:
        source.backup(copy)
    return backup


def restored(file: Engine, backup: Path) -> None:
    """Put the backup in the place of the file, and start with it."""
    file.dispose()
    path = str(file.url.database)
    for ending in ("-wal", "-shm"):
        Path(f"{path}{ending}").unlink(missing_ok=True)
    shutil.copy(backup, path)
    opened(file)


def url_of(shared: Engine | str) -> str:
    """The URL of a database, with its password."""
    return shared if isinstance(shared, str) else shared.url.render_as_string(hide_password=False)


@dataclass
class Publishing:
    """A publisher of a file, and what its callbacks got."""

    file: Engine
    shared: Engine | str
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
                url=url_of(self.shared),
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
def publishing(file: Engine, shared: Engine | str, **given: Any) -> Iterator[Publishing]:
    """A running publisher; at the end everything is published."""
    made = Publishing(file, shared, **given)
    made.publisher.start()
    try:
        yield made
        made.all_published()
    finally:
        made.publisher.close(WITHIN_S)
