"""Publishes an agent's file to the shared database in a thread of its own, batch after batch."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

from sqlalchemy import Engine

from agent.errors import StoreUnavailable
from agent.store.claim import BEAT_EVERY_S
from agent.store.clickhouse.connecting import CLICKHOUSE
from agent.store.clickhouse.destination import ClickHouseDestination
from agent.store.clickhouse.upkeep import ClickHouseUpkeep
from agent.store.connection import store_unavailable
from agent.store.publishing.changes import forget_start, set_published
from agent.store.publishing.destination import (
    AgentFile,
    BatchSize,
    SharedDatabase,
    SharedDestination,
    Upkeep,
)
from agent.store.publishing.postgres import PostgresDestination, PostgresUpkeep

_LOG = logging.getLogger(__name__)

# After a failure, the wait doubles from the first up to the last.
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 10.0

_AWAY = "the shared database cannot be reached"


class _Kind(NamedTuple):
    destination: Callable[[SharedDatabase, AgentFile], SharedDestination]
    upkeep: Callable[..., Upkeep]


_POSTGRES = _Kind(PostgresDestination, PostgresUpkeep)
_KINDS = {CLICKHOUSE: _Kind(ClickHouseDestination, ClickHouseUpkeep)}


def _kind(url: str) -> _Kind:
    return _KINDS.get(url.partition(":")[0], _POSTGRES)


def upkeep_of(url: str, agent: str, *, keep_requests_s: float, keep_rollups_s: float) -> Upkeep:
    """The upkeep of the shared database at a URL. Raises SettingsInvalid."""
    kept = {"keep_requests_s": keep_requests_s, "keep_rollups_s": keep_rollups_s}
    return _kind(url).upkeep(url, agent, **kept)


class Publisher:
    """Publishes what changed in an agent's file, in order.

    While the file or the shared database is away, it tries again after longer and longer waits.
    `on_published` and `on_refused` get the number of rows of each batch. `before_batch` is called
    before each.
    """

    def __init__(
        self,
        file: Engine,
        shared: SharedDatabase,
        *,
        on_published: Callable[[int], None],
        on_refused: Callable[[int], None],
        on_file_failed: Callable[[Exception], None],
        before_batch: Callable[[], None],
    ) -> None:
        self._file = AgentFile(file, on_file_failed)
        self._to = _kind(shared.url).destination(shared, self._file)
        self._size = BatchSize(shared.rows_per_batch)
        self._on_published = on_published
        self._on_refused = on_refused
        self._before_batch = before_batch
        self._ready = False
        self._beaten_at = 0.0
        self._noted, self._noted_at = 0, 0.0
        self._problem: str | None = "the shared database was not reached yet"
        self._problem_since = time.monotonic()
        self._failures = 0
        self._complete = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def is_complete(self, within_s: float) -> bool:
        """Whether the shared database has everything now, or within this time."""
        return self._complete.wait(within_s)

    def problem(self) -> str | None:
        """Why nothing is published and since when, in words; None while it works."""
        problem = self._problem
        if problem is None:
            return None
        return f"{problem} (since {time.monotonic() - self._problem_since:.0f} s)"

    def close(self, within_s: float) -> None:
        """Publish one more batch if the shared database is there, and give the name back.

        Waits `within_s` at most for the thread to end.
        """
        self._stopping.set()
        self._thread.join(within_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._stopping.wait(self._try_batch())
        if self._problem is None:
            self._try_batch()
            with suppress(StoreUnavailable):
                self._to.release()
        self._to.disconnect()

    def _try_batch(self) -> float:
        """Publish a batch; returns the seconds to wait before the next attempt."""
        try:
            with self._as_unavailable():
                is_newest = self._publish_batch()
        except StoreUnavailable as error:
            return self._wait_after(error)
        if self._problem is not None:
            _LOG.info("the agent's file is published to the shared database")
        self._problem, self._failures = None, 0
        if not is_newest:
            self._complete.clear()
            return 0.0
        self._complete.set()
        return self._to.idle_s

    def _wait_after(self, error: StoreUnavailable) -> float:
        """Note a failure; returns the seconds to wait before the next attempt."""
        if not self._failures:
            _LOG.warning("stored rows wait in the agent's file: %s", error)
        if self._problem is None:
            self._problem_since = time.monotonic()
        self._problem = error.public
        self._ready = False
        self._complete.clear()
        self._to.disconnect()
        self._failures += 1
        return min(FIRST_WAIT_S * 2.0 ** min(self._failures - 1, 16), LONGEST_WAIT_S)

    @contextmanager
    def _as_unavailable(self) -> Iterator[None]:
        """Raise StoreUnavailable for any other error: the thread must go on."""
        try:
            yield
        except StoreUnavailable:
            raise
        except Exception as error:
            if not self._to.is_error(error):
                _LOG.exception("a batch could not be published")
            raise store_unavailable(_AWAY, error) from error

    def _publish_batch(self) -> bool:
        """Publish the next changes; returns whether the shared database has everything then."""
        self._make_ready()
        self._before_batch()
        began_at = time.time()
        done = self._to.publish(self._file, self._size)
        self._note(done.last, began_at if done.is_newest else None)
        self._size.succeeded()
        self._on_published(done.rows - done.refused)
        self._on_refused(done.refused)
        return done.is_newest

    def _note(self, number: int, complete_at: float | None) -> None:
        """Note in the file what is published; while nothing waits, the time of that now and then.

        A full disk keeps nothing from being published: what is not noted is measured as waiting.
        """
        if number == self._noted and time.monotonic() - self._noted_at < BEAT_EVERY_S:
            return
        try:
            self._file.write(partial(set_published, number=number, complete_at=complete_at))
        except StoreUnavailable as error:
            _LOG.warning("the agent's file does not note what is published: %s", error)
        else:
            self._noted, self._noted_at = number, time.monotonic()

    def _make_ready(self) -> None:
        if not self._ready:
            self._to.prepare(self._file)
            self._file.write(forget_start)
            self._ready = True
        elif time.monotonic() - self._beaten_at < BEAT_EVERY_S:
            return
        self._to.beat()
        self._beaten_at = time.monotonic()
