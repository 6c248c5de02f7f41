"""The bounds of a journal: how large it may grow, and how long what waits in it is kept."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from sqlalchemy import Connection, Engine, bindparam, text

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
# The last minutes are joined and booked; their rows go last.
_NEEDED_S = 600.0

_TIMES = {requests.name: "started_at", engine_samples.name: "at", gpu_samples.name: "at"}


def _is_copy(table: str) -> str:
    """The condition of rows that are settled and have no note after a number."""
    settled = "settles_at IS NULL AND " if table == requests.name else ""
    return (
        f"{settled}id NOT IN (SELECT row FROM journal_notes "
        f"WHERE number > :last AND of_table = '{table}' AND row IS NOT NULL)"
    )


_COPIES = {
    table: text(
        f"SELECT id, {at} AS at FROM {table} WHERE {at} < :before AND {_is_copy(table)} "
        f"ORDER BY {at} LIMIT :most"
    )
    for table, at in _TIMES.items()
}
_DELETE = {
    table: text(f"DELETE FROM {table} WHERE id IN :ids AND {_is_copy(table)}").bindparams(
        bindparam("ids", expanding=True)
    )
    for table in _TIMES
}

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
            self._make_room(now - _NEEDED_S)
        if self._used > self._max_bytes:
            self._make_room(now)
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
        return self._delete_copies(now - self.max_age_s, lambda: False)

    def _make_room(self, before: float) -> None:
        """Delete the oldest copies from before a time, until there is room or none is left."""

        def is_roomy() -> bool:
            self._measure()
            return self._used <= _ROOMY * self._max_bytes

        self._delete_copies(before, is_roomy)

    def _delete_copies(self, before: float, is_enough: Callable[[], bool]) -> int:
        """Delete copies from before a time, the oldest first; returns how many.

        They are looked for in a snapshot, as that may take seconds where much waits: a transaction
        that writes would keep all writers waiting.
        """
        deleted = 0
        while True:
            with reading(self._engine) as connection:
                last, copies = _oldest_copies(connection, before)
            if not copies:
                return deleted
            for table, ids in copies.items():
                work = partial(_deleted, table=table, ids=ids, last=last)
                deleted += in_transaction(self._writing, work)
            if is_enough():
                return deleted


def _oldest_copies(connection: Connection, before: float) -> tuple[int, dict[str, list[int]]]:
    """The last note, and the ids of the oldest rows from before a time that do not wait."""
    last = connection.exec_driver_sql("SELECT coalesce(max(number), 0) FROM journal_notes")
    values = {"before": sqlite_timestamp(before), "last": 0, "most": ROWS_PER_SLICE}
    found = [
        (row.at, row.id, table)
        for table, query in _COPIES.items()
        for row in connection.execute(query, values)
    ]
    copies: dict[str, list[int]] = {}
    for _, row, table in sorted(found)[:ROWS_PER_SLICE]:
        copies.setdefault(table, []).append(row)
    return last.scalar_one(), copies


def _deleted(connection: Connection, table: str, ids: Sequence[int], last: int) -> int:
    """Delete these rows unless they have a note after the last one; returns how many."""
    with _unnoted(connection):
        return int(connection.execute(_DELETE[table], {"ids": ids, "last": last}).rowcount)


@contextmanager
def _unnoted(connection: Connection) -> Iterator[None]:
    """Inside, deletions are not noted: those rows stay in the shared database."""
    connection.execute(text("UPDATE journal_state SET expiring = 1"))
    yield
    connection.execute(text("UPDATE journal_state SET expiring = 0"))
