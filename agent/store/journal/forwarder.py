"""Forwards a journal to the shared database in a thread of its own, batch after batch."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from sqlalchemy import Engine

from agent.errors import StoreUnavailable
from agent.store.claim import BEAT_EVERY_S
from agent.store.connection import store_unavailable
from agent.store.journal.backlog import Run, forget, forget_run, has_notes, runs_of
from agent.store.journal.destination import BatchSize, Forwarded, JournalFile, SharedDatabase
from agent.store.journal.destinations import destination_of

_LOG = logging.getLogger(__name__)

# After a failure, the wait doubles from the first up to the last.
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 10.0

_AWAY = "the shared database cannot be reached"


class JournalForwarder:
    """Forwards the backlog of a journal in order. Notes that are committed there are deleted here.

    While the journal or the shared database is away, it tries again after longer and longer waits.
    A row that the shared database refuses for its content is left out. `on_forwarded` and
    `on_refused` get the number of notes of each batch. `give_way` is called before each batch.
    """

    def __init__(
        self,
        journal: Engine,
        destination: SharedDatabase,
        *,
        on_forwarded: Callable[[int], None],
        on_refused: Callable[[int], None],
        on_journal_failed: Callable[[Exception], None],
        give_way: Callable[[], None] = lambda: None,
    ) -> None:
        self._journal = JournalFile(journal, on_journal_failed)
        self._to = destination_of(destination, self._journal)
        self._size = BatchSize(destination.notes_per_batch)
        self._on_forwarded = on_forwarded
        self._on_refused = on_refused
        self._give_way = give_way
        self._ready = False
        self._beaten_at = 0.0
        self._problem: str | None = "the shared database was not reached yet"
        self._problem_since = time.monotonic()
        self._failures = 0
        self._caught_up = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="journal-forwarder", daemon=True)

    def start(self) -> None:
        """Start the thread that forwards."""
        self._thread.start()

    def has_caught_up(self, within_s: float) -> bool:
        """Whether the shared database has everything now, or within this time."""
        return self._caught_up.wait(within_s)

    def problem(self) -> str | None:
        """Why nothing is forwarded and since when, in words; None while it works."""
        problem = self._problem
        if problem is None:
            return None
        return f"{problem} (since {time.monotonic() - self._problem_since:.0f} s)"

    def close(self, within_s: float) -> None:
        """Forward one more batch if the shared database is there, and give the name back.

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
        """Forward a batch; returns the seconds to wait before the next attempt."""
        try:
            with self._as_unavailable():
                is_behind = self._forward_batch()
        except StoreUnavailable as error:
            return self._wait_after(error)
        if self._problem is not None:
            _LOG.info("the journal is forwarded to the shared database")
        self._problem, self._failures = None, 0
        if is_behind:
            self._caught_up.clear()
            return 0.0
        self._caught_up.set()
        return self._to.idle_s

    def _wait_after(self, error: StoreUnavailable) -> float:
        """Note a failure; returns the seconds to wait before the next attempt."""
        if not self._failures:
            _LOG.warning("stored rows wait in the journal: %s", error)
        if self._problem is None:
            self._problem_since = time.monotonic()
        self._problem = error.public
        self._ready = False
        self._caught_up.clear()
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
                _LOG.exception("a batch of the journal could not be forwarded")
            raise store_unavailable(_AWAY, error) from error

    def _forward_batch(self) -> bool:
        """Forward a batch of the oldest run with notes; returns whether there may be more."""
        self._make_ready()
        with self._journal.reading() as journal:
            runs = runs_of(journal)
            filled = [run for run in runs if has_notes(journal, run)]
        for run in runs[:-1]:
            if run not in filled:
                self._journal.write(partial(forget_run, run=run))
        if not filled:
            return False
        most = self._size.most
        self._give_way()
        done = self._to.forward(self._journal, filled[0], self._size)
        self._count(done, filled[0])
        all_of_run = done.taken and 0 < done.notes < most
        return len(filled) > 1 or not all_of_run

    def _make_ready(self) -> None:
        if not self._ready:
            self._to.prepare()
            self._ready = True
        elif time.monotonic() - self._beaten_at < BEAT_EVERY_S:
            return
        self._to.beat()
        self._beaten_at = time.monotonic()

    def _count(self, done: Forwarded, run: Run) -> None:
        """Delete the notes of a batch that was taken, or of a single note that was refused."""
        if not done.taken and done.notes > 1:
            return
        self._journal.write(partial(forget, run=run, last=done.last))
        if not done.taken:
            self._on_refused(done.notes)
        elif done.notes:
            self._size.succeeded()
            self._on_forwarded(done.notes)
