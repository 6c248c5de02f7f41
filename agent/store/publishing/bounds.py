"""The bounds of a published file: how large it may grow, and how long its rows are kept."""

import logging
from collections.abc import Callable

from sqlalchemy import Engine, TextClause, text

from agent.catalog.reasons import LostRows
from agent.errors import StoreUnavailable
from agent.store.connection import for_writing, in_transaction, reading, without_number
from agent.store.publishing.changes import Lag, lag_of
from agent.store.retention import ROWS_PER_SLICE
from agent.store.rows import sqlite_timestamp
from agent.store.tables import engine_samples, gpu_samples, requests

_LOG = logging.getLogger(__name__)

# Rows that were published are only copies: beyond the first share of the bound the oldest of them
# are deleted, down to the second.
_CROWDED, _ROOMY = 0.8, 0.7
# After it was full, the file takes requests again below this share.
_FREE_AGAIN = 0.95
# The last minutes are joined and computed; their rows go last.
_NEEDED_S = 600.0

_TIMES = {requests.name: "started_at", engine_samples.name: "at", gpu_samples.name: "at"}


def _delete(table: str, at: str, conditions: str) -> TextClause:
    # By the index on `changed` alone: with much that waits, others read too many rows.
    return text(
        f"DELETE FROM {table} WHERE id IN (SELECT id FROM {table} "
        f"WHERE +{at} < :before AND {conditions} ORDER BY changed LIMIT :most)"
    )


_NUMBER = "(SELECT published FROM publishing)"
# A view that waits for another view was not published yet.
_COPIES = {
    table: _delete(
        table,
        at,
        f"changed <= {_NUMBER}" + (" AND settles_at IS NULL" if table == requests.name else ""),
    )
    for table, at in _TIMES.items()
}
_WAITING = {table: _delete(table, at, f"changed > {_NUMBER}") for table, at in _TIMES.items()}

OnDropped = Callable[[LostRows, int], None]


class FileBounds:
    """Measures a published file, deletes what it need not keep, and says when it is full.

    Its figures are those of the last `keep`: reading them asks no database.
    """

    def __init__(
        self, engine: Engine, *, max_bytes: int, max_age_s: float, on_dropped: OnDropped
    ) -> None:
        self._engine = engine
        self._writing = without_number(for_writing(engine))
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
        """What waits to be published."""
        return self._lag

    def require(self) -> None:
        """Raise StoreUnavailable while the file is full."""
        if self._full:
            raise StoreUnavailable(
                f"the agent's file is full: {self._lag.rows} rows wait in it for the shared "
                "database; send again in a moment"
            )

    def require_for_sample(self) -> None:
        """The same for a sample, which is not sent again: it is dropped and counted."""
        if self._full:
            self._on_dropped(LostRows.FULL, 1)
        self.require()

    def lost(self) -> None:
        """Count what waited in a file that was set aside."""
        self._on_dropped(LostRows.DAMAGED, max(self._lag.rows, 1))

    def keep(self, now: float) -> None:
        """Keep the bounds, and measure. Raises StoreUnavailable."""
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

    def expire(self, now: float) -> int:
        """Delete requests and samples older than `max_age_s`, counting those that waited.

        Returns how many were deleted.
        """
        before = now - self.max_age_s
        dropped = sum(self._deleted(each, before, lambda: False) for each in _WAITING.values())
        if dropped:
            self._on_dropped(LostRows.AGE, dropped)
            _LOG.warning("%d rows waited for the shared database too long and are dropped", dropped)
        return dropped + sum(
            self._deleted(each, before, lambda: False) for each in _COPIES.values()
        )

    def _make_room(self, before: float) -> None:
        """Delete the oldest copies from before a time, until there is room or none is left."""

        def is_roomy() -> bool:
            self._measure()
            return self._used <= _ROOMY * self._max_bytes

        for statement in _COPIES.values():
            if is_roomy():
                return
            self._deleted(statement, before, is_roomy)

    def _deleted(self, statement: TextClause, before: float, is_enough: Callable[[], bool]) -> int:
        """Delete rows from before a time in slices, the oldest first; returns how many."""
        values = {"before": sqlite_timestamp(before), "most": ROWS_PER_SLICE}
        deleted, slice_of = 0, ROWS_PER_SLICE
        while slice_of == ROWS_PER_SLICE and not (deleted and is_enough()):
            slice_of = in_transaction(
                self._writing,
                lambda connection: int(connection.execute(statement, values).rowcount),
            )
            deleted += slice_of
        return deleted
