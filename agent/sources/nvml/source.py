"""The source of GPU samples that reads NVML."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from agent.catalog.gpu_problems import NOT_ANSWERING
from agent.catalog.reasons import INTERNAL
from agent.records.gpu import GpuSample, GpuSamples
from agent.sources.nvml.session import Lifecycle, SessionResult
from agent.sources.nvml.xid_events import XidErrors

_LOG = logging.getLogger(__name__)

Result = TypeVar("Result")


class NvmlSource:
    """Reads all GPUs that NVML shows. `read` raises nothing; it must not run twice at once.

    NVML is called on a thread of its own. A read waits `timeout_s` for it. A result that comes
    later is returned by the next read. Xid errors arrive on a third thread and wait for the next
    read, also while the driver does not answer.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        timeout_s: float = 2.0,
        event_wait_ms: int = 500,
    ) -> None:
        self._timeout_s = timeout_s
        self._xids = XidErrors(clock)
        self._lifecycle = Lifecycle(self._xids, monotonic, event_wait_ms)
        self._worker = Worker("nvml")
        self._pending: Future[SessionResult] | None = None
        self._known: dict[str, GpuSample] = {}
        self._closed = False

    def read(self, now: float) -> GpuSamples:
        """Read every GPU once; `now` is Unix time."""
        if self._closed:
            return GpuSamples()
        try:
            result = self._result(now)
        except Exception:
            # A driver can answer in ways that no code here expects; the other reads must go on.
            _LOG.exception("the read of the GPUs failed inside the agent")
            result = self._all_missing(INTERNAL)
        samples = [*result.samples]
        for sample in samples:
            before = self._known.get(sample.gpu)
            if before is not None and before.problem is not None:
                _LOG.info("GPU %s (index %d) is read again", sample.gpu, sample.index)
        samples += [
            self._unread(self._known[gpu], reason, now)
            for gpu, reason in result.missing.items()
            if gpu in self._known
        ]
        self._known |= {sample.gpu: sample for sample in samples}
        return GpuSamples(tuple(samples), self._xids.take(), result.failures)

    def _result(self, now: float) -> SessionResult:
        late = self._pending is not None
        if self._pending is None:
            self._pending = self._worker.submit(partial(self._lifecycle.read, now))
        try:
            result = self._pending.result(0 if late else self._timeout_s)
        except TimeoutError:
            if not late:
                _LOG.warning(
                    "NVML has not answered for %.1f s; the GPUs are unknown until it does",
                    self._timeout_s,
                )
            return self._all_missing(NOT_ANSWERING)
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        if late:
            _LOG.info("NVML answers again")
        return result

    def _all_missing(self, reason: str) -> SessionResult:
        return SessionResult((), dict.fromkeys(self._known, reason), (reason,))

    def _unread(self, before: GpuSample, reason: str, now: float) -> GpuSample:
        if before.problem != reason:
            _LOG.warning("GPU %s (index %d) cannot be read: %s", before.gpu, before.index, reason)
        return before.unread(now, reason, self._xids.facts(before.gpu))

    def close(self) -> None:
        """Shut NVML down, waiting no longer than a read does."""
        if self._closed:
            return
        self._closed = True
        ended = self._worker.submit(self._lifecycle.close)
        self._worker.close()
        try:
            ended.result(self._timeout_s)
        except TimeoutError:
            _LOG.warning("NVML does not answer and is not shut down")


class Worker:
    """Runs tasks one by one on a thread. A task that hangs blocks neither its caller nor exit."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        # Not an executor: its threads are joined at exit, and a hanging driver would block that.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """The task's result or error, once it is done."""
        future: Future[Result] = Future()
        self._tasks.put((future, task))
        return future

    def close(self) -> None:
        """End after the tasks that were submitted."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            future, task = item
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
