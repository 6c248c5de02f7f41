"""The one writer of requests: a thread that commits all waiting batches together."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from agent.errors import StoreUnavailable
from agent.records.objective import JudgedRequest, Settled, WriteResult
from agent.store.inserting import Key, key_of

_LOG = logging.getLogger(__name__)

# A sender's batch is 512 spans. With more waiting rows, senders are asked to send again later.
MAX_WAITING_ROWS = 16_384
MAX_ROWS_PER_COMMIT = 4096


Write = Callable[[Sequence[JudgedRequest]], WriteResult]
Settle = Callable[[float], Settled]


@dataclass(frozen=True, slots=True)
class _Submission:
    judged: Sequence[JudgedRequest]
    stored: "Future[WriteResult]"
    since: float


@dataclass(frozen=True, slots=True)
class _Settlement:
    now: float
    settled: "Future[Settled]"


class RequestWriter:
    """Takes requests from any thread and stores them in its own thread.

    `write` makes one commit. `settle` settles the requests whose wait for another view has ended.
    `between` is called after each attempt to commit, when the senders have their result. All three
    run in the writer's thread.
    """

    def __init__(
        self,
        write: Write,
        settle: Settle | None = None,
        between: Callable[[], None] | None = None,
    ) -> None:
        self._write = write
        self._settle = settle
        self._between = between
        self._submissions: queue.SimpleQueue[_Submission | _Settlement | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_rows = 0
        self._oldest_since: float | None = None
        self._newest_at: float | None = None
        self._open = True
        self._thread = threading.Thread(target=self._run, name="request-writer", daemon=True)
        self._thread.start()

    @property
    def waiting_rows(self) -> int:
        """How many submitted rows are not yet committed."""
        return self._waiting_rows

    @property
    def lag_s(self) -> float:
        """For how long the oldest submission has waited; 0 while none waits."""
        since = self._oldest_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def newest_at(self) -> float | None:
        """When the newest stored request came, in Unix time; None before the first."""
        return self._newest_at

    def submit(self, judged: Sequence[JudgedRequest]) -> "Future[WriteResult]":
        """A future of the result, done when the requests are committed.

        It fails with StoreUnavailable when they are not; the same requests may be submitted again.
        Raises StoreUnavailable at once when too many rows wait already.
        """
        submission = _Submission(judged, Future(), time.monotonic())
        # A submission cannot be cancelled: it is stored even if its sender has left.
        submission.stored.set_running_or_notify_cancel()
        with self._lock:
            if not self._open:
                raise StoreUnavailable("the agent is stopping; send the spans again in a moment")
            if self._waiting_rows and self._waiting_rows + len(judged) > MAX_WAITING_ROWS:
                raise StoreUnavailable(
                    f"{self._waiting_rows} rows wait for the database; send again in a moment"
                )
            self._waiting_rows += len(judged)
            if self._oldest_since is None:
                self._oldest_since = submission.since
            self._submissions.put(submission)
        return submission.stored

    def settle(self, now: float) -> "Future[Settled]":
        """A future of the requests that are settled because their wait ended by `now` (Unix time).

        It fails with StoreUnavailable while the database is away; a later call settles them.
        """
        settlement = _Settlement(now, Future())
        settlement.settled.set_running_or_notify_cancel()
        with self._lock:
            if not self._open:
                raise StoreUnavailable("the agent is stopping; waiting requests are settled later")
            self._submissions.put(settlement)
        return settlement.settled

    def close(self, within_s: float | None = None) -> None:
        """Commit all submissions, then stop. Further submissions are refused.

        After `within_s` the remaining ones are dropped: their senders got no acknowledgement.
        """
        with self._lock:
            if not self._open:
                return
            self._open = False
            self._submissions.put(None)
        self._thread.join(within_s)

    def _run(self) -> None:
        while (group := self._next_group()) is not None:
            # Submissions behind this group in the queue are younger.
            self._oldest_since = group[0].since
            self._commit(group)
            with self._lock:
                self._waiting_rows -= sum(len(submission.judged) for submission in group)
                # Submissions that came during the commit also wait for `between`.
                self._oldest_since = time.monotonic() if self._waiting_rows else None
            try:
                if self._between is not None:
                    self._between()
            except Exception:
                # The thread must go on for the next sender.
                _LOG.exception("the work between two commits failed")

    def _next_group(self) -> list[_Submission] | None:
        """All waiting submissions, up to a full commit; None when the writer was closed."""
        group: list[_Submission] = []
        rows = 0
        while not group or (rows < MAX_ROWS_PER_COMMIT and not self._submissions.empty()):
            taken = self._submissions.get()
            if isinstance(taken, _Settlement):
                self._settle_now(taken)
            elif taken is None:
                if not group:
                    return None
                self._submissions.put(None)
                break
            else:
                group.append(taken)
                rows += len(taken.judged)
        return group

    def _settle_now(self, settlement: _Settlement) -> None:
        try:
            settled = Settled([], []) if self._settle is None else self._settle(settlement.now)
        except StoreUnavailable as error:
            settlement.settled.set_exception(error)
        except Exception as error:
            _LOG.exception("waiting requests could not be settled")
            settlement.settled.set_exception(
                StoreUnavailable("waiting requests could not be settled", repr(error))
            )
        else:
            settlement.settled.set_result(settled)

    def _commit(self, group: Sequence[_Submission]) -> None:
        try:
            result = self._write_checked([item for each in group for item in each.judged])
        except StoreUnavailable as error:
            for submission in group:
                submission.stored.set_exception(error)
        else:
            if result.new:
                self._newest_at = result.new[-1].record.received_at
            _set_results(group, result)

    def _write_checked(self, judged: Sequence[JudgedRequest]) -> WriteResult:
        try:
            return self._write(judged)
        except StoreUnavailable:
            raise
        except Exception as error:
            # The thread must go on for the next sender.
            _LOG.exception("%d requests could not be stored", len(judged))
            raise StoreUnavailable("the requests could not be stored", repr(error)) from error


def _set_results(group: Sequence[_Submission], result: WriteResult) -> None:
    """Give each submission the part of the result that is about its own requests."""
    if len(group) == 1:
        group[0].stored.set_result(result)
        return
    new_by_id = {id(item): item for item in result.new}
    refused_ids = {id(item) for item in result.refused}
    counted_by_key = _by_view(result, result.counted)
    final_by_key = _by_view(result, result.final)
    for submission in group:
        found = [new_by_id.pop(id(item), None) for item in submission.judged]
        new = [item for item in found if item is not None]
        counted, final = _popped(counted_by_key, new), _popped(final_by_key, new)
        refused = [item for item in submission.judged if id(item) in refused_ids]
        submission.stored.set_result(WriteResult(new, counted, final, refused))


def _popped(by_key: dict[Key, JudgedRequest], new: Sequence[JudgedRequest]) -> list[JudgedRequest]:
    found = [by_key.pop(key_of(item), None) for item in new]
    return [item for item in found if item is not None]


def _by_view(result: WriteResult, items: Sequence[JudgedRequest]) -> dict[Key, JudgedRequest]:
    """Requests by the key of the view that completed them.

    That is the proxy's view where both views were new in this commit.
    """
    new = {key_of(item) for item in result.new}
    found = {}
    for item in items:
        proxy_key = (item.record.trace_id, item.record.proxy_span_id or "")
        found[proxy_key if proxy_key in new else key_of(item)] = item
    return found
