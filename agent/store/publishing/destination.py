"""The interface of shared databases, and what all of them use."""

import hashlib
import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from sqlalchemy import Connection, Engine, Table

from agent.records.objective import Objective
from agent.store.claim import AgentState
from agent.store.connection import (
    driver_message,
    for_writing,
    in_transaction,
    store_unavailable,
    without_number,
)
from agent.store.publishing.changes import COLUMNS, Lag, Row, lag_of
from agent.store.rollups import Series

_LOG = logging.getLogger(__name__)

ROWS_PER_BATCH = 5000
# A slow server cancels a statement after the first; a frozen one is cut off after the second.
STATEMENT_S, CUT_OFF_S = 20.0, 30.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDatabase:
    """The URL of the shared database, and the agent that publishes to it."""

    url: str
    agent: str
    instance: str
    objectives: Sequence[Objective]
    state: AgentState = field(default_factory=AgentState)
    cut_off_s: float = CUT_OFF_S
    rows_per_batch: int = ROWS_PER_BATCH


class AgentFile:
    """The file that is published. Raises StoreUnavailable.

    `on_failed` gets each error of SQLite while the file is read.
    """

    def __init__(self, engine: Engine, on_failed: Callable[[Exception], None]) -> None:
        self._reading = engine
        self._writing = without_number(for_writing(engine))
        self._on_failed = on_failed

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection that reads one snapshot."""
        try:
            with self._reading.begin() as connection:
                yield connection
        except Exception as error:
            if not isinstance(getattr(error, "orig", error), sqlite3.Error):
                raise
            self._on_failed(error)
            raise store_unavailable("the agent's file cannot be read", error) from error

    def write(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` in a transaction of its own, whose rows are not published."""
        return in_transaction(self._writing, work)

    def lag(self) -> Lag:
        """What waits to be published."""
        with self.reading() as connection:
            return lag_of(connection)


class BatchSize:
    """How many rows the next batch may have: fewer after a failure, more after a success."""

    def __init__(self, most: int) -> None:
        self._largest = most
        self.most = most

    def failed(self) -> None:
        """Allow a quarter: a slow server writes a smaller batch in time."""
        self.most = max(self.most // 4, 1)

    def succeeded(self) -> None:
        """Allow four times as many, up to the configured number."""
        self.most = min(self.most * 4, self._largest)


class Published(NamedTuple):
    """The result of publishing a batch: the number of its last transaction, and its rows.

    `is_newest` if no later transaction had ended. `refused` rows were left out for their content.
    """

    last: int
    is_newest: bool
    rows: int
    refused: int


def write_all_but_refused(
    table: str,
    rows: Sequence[Row],
    write: Callable[[Sequence[Row]], None],
    is_refusal: Callable[[Exception], bool],
) -> list[Row]:
    """Write rows; if one is refused, halves of them until it is alone. Returns the refused."""
    if not rows:
        return []
    try:
        write(rows)
        return []
    except Exception as error:
        if not is_refusal(error):
            raise
        if len(rows) == 1:
            why = driver_message(error)
            _LOG.warning(
                "the shared database refuses a row of %s: %s: %.200r", table, why, rows[0][:4]
            )
            return [*rows]
    half = len(rows) // 2
    parts = (rows[:half], rows[half:])
    return [row for part in parts for row in write_all_but_refused(table, part, write, is_refusal)]


def shared_ids(file: str, series: Mapping[int, Series]) -> dict[int, int]:
    """The ids of a file's series in a shared database, by their ids in the file.

    They are made of the file and the series: no agent needs to ask another one for an id.
    """
    return {row_id: _shared_id(file, each) for row_id, each in series.items()}


def _shared_id(file: str, series: Series) -> int:
    text = "\0".join((file, *series))
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    # A 64-bit integer of SQL has a sign.
    return int.from_bytes(digest, "big") >> 1


def with_shared_series(table: Table, rows: Iterable[Row], ids: Mapping[int, int]) -> list[Row]:
    """Rows of rollups or of cause rollups, with the ids of a shared database.

    A row whose series is not in the file belongs to nothing, and is left out.
    """
    at = COLUMNS[table.name].index("series")
    return [(*row[:at], ids[row[at]], *row[at + 1 :]) for row in rows if row[at] in ids]


class SharedDestination(Protocol):
    """A shared database. Raises the errors of its driver and SQLAlchemy's, and StoreUnavailable.

    After a batch that was the newest, the next one waits for `idle_s`.
    """

    idle_s: float

    def prepare(self, file: AgentFile) -> None:
        """Migrate it, take the agent's name there, and store the agent's objectives.

        If it has more of the file than the file itself, which was restored from a backup, the file
        gets that back.
        """

    def beat(self) -> None:
        """Update the agent's row in `agents`, so that no other agent takes its name."""

    def release(self) -> None:
        """Give the agent's name back."""

    def publish(self, file: AgentFile, size: BatchSize) -> Published:
        """Write the next batch; one without rows if it has everything."""

    def is_error(self, error: Exception) -> bool:
        """Whether SQLAlchemy or the database's driver raised the error."""

    def disconnect(self) -> None:
        """Close the connections; the next use connects anew."""


class Upkeep(Protocol):
    """The jobs of an agent on a shared database. Raises StoreUnavailable."""

    def expire(self, now: float) -> None:
        """Delete old rows, and merge old minutes of the agent."""

    def close(self) -> None:
        """Close the connections."""
