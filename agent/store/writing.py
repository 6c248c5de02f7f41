"""The one writer of requests: whoever waits together is committed together."""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from agent.errors import StoreUnavailable
from agent.records.objective import JudgedRequest
from agent.store.connection import cause, for_writing
from agent.store.inserting import insert_new
from agent.store.rollups import add_to_rollups

_LOG = logging.getLogger(__name__)

# A sender's batch is 512 spans; this many rows wait at most before senders are told to come back.
MAX_WAITING_ROWS = 16_384
MAX_ROWS_PER_COMMIT = 4096


@dataclass(frozen=True, slots=True)
class _Submission:
    judged: Sequence[JudgedRequest]
    stored: "Future[list[JudgedRequest]]"


class RequestWriter:
    """Takes requests from any thread and stores them in its own.

    `write` is what happens inside one commit; it answers which requests were new. Without requests
    it only tells whether the database takes any.
    """

    def __init__(self, write: Callable[[Sequence[JudgedRequest]], list[JudgedRequest]]) -> None:
        self._write = write
        self._submissions: queue.SimpleQueue[_Submission | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_rows = 0
        self._open = True
        self._thread = threading.Thread(target=self._run, name="request-writer", daemon=True)
        self._thread.start()

    @property
    def waiting_rows(self) -> int:
        """How many rows were handed in and are not yet committed."""
        return self._waiting_rows

    def submit(self, judged: Sequence[JudgedRequest]) -> "Future[list[JudgedRequest]]":
        """A future of the requests that were new, each once, done when they are committed.

        It fails with StoreUnavailable when they are not; the same submission may succeed later.
        Raises StoreUnavailable at once when too many rows wait already.
        """
        submission = _Submission(judged, Future())
        # What was handed in is stored, also when nobody waits for the answer any more.
        submission.stored.set_running_or_notify_cancel()
        with self._lock:
            if not self._open:
                raise StoreUnavailable("the agent is stopping; send the spans again in a moment")
            if self._waiting_rows and self._waiting_rows + len(judged) > MAX_WAITING_ROWS:
                raise StoreUnavailable(
                    f"{self._waiting_rows} rows wait for the database; send again in a moment"
                )
            self._waiting_rows += len(judged)
            self._submissions.put(submission)
        return submission.stored

    def close(self) -> None:
        """Commit what was handed in, then stop. Nothing is taken any more."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            self._submissions.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (group := self._next_group()) is not None:
            self._commit(group)
            with self._lock:
                self._waiting_rows -= sum(len(submission.judged) for submission in group)

    def _next_group(self) -> list[_Submission] | None:
        """All that wait now, up to a full commit; None when the writer was closed."""
        first = self._submissions.get()
        if first is None:
            return None
        group, rows = [first], len(first.judged)
        while rows < MAX_ROWS_PER_COMMIT and not self._submissions.empty():
            submission = self._submissions.get()
            if submission is None:
                self._submissions.put(None)
                break
            group.append(submission)
            rows += len(submission.judged)
        return group

    def _commit(self, group: Sequence[_Submission]) -> None:
        together = [item for submission in group for item in submission.judged]
        try:
            new = self._written(together)
        except StoreUnavailable as error:
            self._commit_apart(group, error)
        else:
            _answer(group, new)

    def _commit_apart(self, group: Sequence[_Submission], error: StoreUnavailable) -> None:
        """One sender's rows must not take another's with them."""
        if len(group) == 1 or not self._takes_rows():
            for submission in group:
                submission.stored.set_exception(error)
            return
        for submission in group:
            self._commit([submission])

    def _takes_rows(self) -> bool:
        """Whether the rows were at fault; a database that is away would be waited for each time."""
        try:
            self._written([])
        except StoreUnavailable:
            return False
        return True

    def _written(self, judged: Sequence[JudgedRequest]) -> list[JudgedRequest]:
        try:
            return self._write(judged)
        except StoreUnavailable:
            raise
        except Exception as error:
            # Whatever it is, the next sender must find a writer.
            _LOG.exception("%d requests could not be stored", len(judged))
            raise StoreUnavailable(f"the requests could not be stored: {error!r}") from error


def _answer(group: Sequence[_Submission], new: Sequence[JudgedRequest]) -> None:
    if len(group) == 1:
        group[0].stored.set_result(list(new))
        return
    unanswered = {id(item): item for item in new}
    for submission in group:
        found = [unanswered.pop(id(item), None) for item in submission.judged]
        submission.stored.set_result([item for item in found if item is not None])


def request_write(
    engine: Engine,
) -> Callable[[Sequence[JudgedRequest]], list[JudgedRequest]]:
    """What stores requests and their rollups in one transaction and answers which were new."""
    writing = for_writing(engine)

    def write(judged: Sequence[JudgedRequest]) -> list[JudgedRequest]:
        try:
            with writing.begin() as connection:
                new = insert_new(connection, judged)
                add_to_rollups(connection, new)
            return new
        except (SQLAlchemyError, ValueError, OverflowError) as error:
            raise StoreUnavailable(f"the requests could not be stored: {cause(error)}") from error

    return write
