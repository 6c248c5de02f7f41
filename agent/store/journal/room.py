"""The bounds of a journal: how large it may grow, and how long what waits in it is kept."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from sqlalchemy import Connection, Engine, text

from agent.catalog.reasons import JournalDropped
from agent.errors import StoreUnavailable
from agent.store.connection import for_writing, in_transaction, reading
from agent.store.journal.backlog import Lag, drop_until, lag_of, last_noted_before
from agent.store.retention import ROWS_PER_SLICE
from agent.store.rows import sqlite_timestamp
from agent.store.tables import engine_samples, gpu_samples, requests

_LOG = logging.getLogger(__name__)

# Rows that were forwarded are only copies: beyond the first share of the bound the oldest of them
# are deleted, down to the second.
_CROWDED, _ROOMY = 0.8, 0.7
# After it was full, the journal takes requests again below this share.
_FREE_AGAIN = 0.95
# A step of deleting copies: this share of the time that the journal covers.
_STEP = 0.1
# The last minutes are joined and booked; their rows go last.
_NEEDED_S = 600.0

_TIMES = ((requests, "started_at"), (engine_samples, "at"), (gpu_samples, "at"))

OnDropped = Callable[[JournalDropped, int], None]


class JournalRoom:
    """Measures a journal, deletes what it need not keep, and says when it is full.

    Its figures are those of the last `keep`: reading them asks no database.
    """

    def __init__(
        self, engine: Engine, *, max_bytes: int, max_age_s: float, on_dropped: OnDropped
    ) -> None:
        self._engine = engine
        self._writing = for_writing(engine)
        self._max_bytes = max_bytes
        self.max_age_s = max_age_s
        self._on_dropped = on_dropped
        self._used = 0
        self._lag = Lag(0, 0.0)
        self._full = False

    @property
    def used_bytes(self) -> int:
        """The bytes of the file that hold rows."""
        return self._used

    @property
    def lag(self) -> Lag:
        """What waits to be forwarded."""
        return self._lag

    def require(self) -> None:
        """Raise StoreUnavailable while the journal is full."""
        if self._full:
            raise StoreUnavailable(
                f"the journal is full: {self._lag.rows} changes wait in it for the shared "
                "database; send again in a moment"
            )

    def require_for_sample(self) -> None:
        """The same for a sample, which is not sent again: it is dropped and counted."""
        if self._full:
            self._on_dropped(JournalDropped.FULL, 1)
        self.require()

    def lost(self) -> None:
        """Count what waited in a file that was set aside."""
        self._on_dropped(JournalDropped.DAMAGED, max(self._lag.rows, 1))

    def keep(self, now: float) -> None:
        """Keep the bounds, and measure. Raises StoreUnavailable."""
        self._drop_old(now)
        self._measure()
        if self._used > _CROWDED * self._max_bytes:
            self._make_room(now, now - _NEEDED_S)
        if self._used > self._max_bytes:
            self._make_room(now, now)
        self._full = self._used > self._max_bytes * (_FREE_AGAIN if self._full else 1)

    def _measure(self) -> None:
        with reading(self._engine) as connection:
            pages, free, size = (
                connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
                for name in ("page_count", "freelist_count", "page_size")
            )
            self._used = (pages - free) * size
            self._lag = lag_of(connection)

    def _drop_old(self, now: float) -> None:
        """Drop what waits for longer than it may."""
        before = now - self.max_age_s
        with reading(self._engine) as connection:
            last = last_noted_before(connection, before)
        if last is None:
            return
        dropped = in_transaction(self._writing, partial(drop_until, last=last))
        self._on_dropped(JournalDropped.AGE, dropped)
        _LOG.warning("%d changes waited for the shared database too long and are dropped", dropped)

    def expire(self, now: float) -> int:
        """Delete the copies of rows that are older than the bound; returns how many."""
        return self._delete_copies(now - self.max_age_s)

    def _make_room(self, now: float, until: float) -> None:
        """Delete the oldest copies from before a time, until there is room or none is left."""
        oldest = in_transaction(self._engine, _oldest)
        while oldest is not None and self._used > _ROOMY * self._max_bytes:
            before = min(oldest + max(_STEP * (now - oldest), 1.0), until)
            if before <= oldest:
                return
            self._delete_copies(before)
            self._measure()
            oldest = before

    def _delete_copies(self, before: float) -> int:
        deleted = 0
        for table, column in _TIMES:
            slice_of = ROWS_PER_SLICE
            while slice_of == ROWS_PER_SLICE:
                slice_of = in_transaction(
                    self._writing,
                    partial(_deleted, table=table.name, column=column, before=before),
                )
                deleted += slice_of
        return deleted


def _deleted(connection: Connection, table: str, column: str, before: float) -> int:
    """Delete some rows from before a time that do not wait; returns how many."""
    settled = "AND settles_at IS NULL " if table == requests.name else ""
    statement = text(
        f"DELETE FROM {table} WHERE id IN (SELECT id FROM {table} WHERE {column} < :before "
        f"{settled}AND id NOT IN (SELECT row FROM journal_notes "
        "WHERE of_table = :of_table AND row IS NOT NULL) LIMIT :most)"
    )
    values = {
        "before": sqlite_timestamp(before),
        "of_table": table,
        "most": ROWS_PER_SLICE,
    }
    with _unnoted(connection):
        return int(connection.execute(statement, values).rowcount)


@contextmanager
def _unnoted(connection: Connection) -> Iterator[None]:
    """Inside, deletions are not noted: those rows stay in the shared database."""
    connection.execute(text("UPDATE journal_state SET expiring = 1"))
    yield
    connection.execute(text("UPDATE journal_state SET expiring = 0"))


def _oldest(connection: Connection) -> float | None:
    """The time of the oldest row."""
    found = [
        connection.execute(
            table.select().with_only_columns(table.c[column]).order_by(table.c[column]).limit(1)
        ).scalar()
        for table, column in _TIMES
    ]
    return min((each for each in found if each is not None), default=None)
