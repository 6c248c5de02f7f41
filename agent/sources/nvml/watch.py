"""The watch over all GPUs that NVML shows: a sample of each at a poll, Xid errors in between."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agent.catalog.gpu_facts import UP
from agent.records.gpu import GpuSample, XidSeen
from agent.sources.nvml.library import INTERNAL
from agent.sources.nvml.lifecycle import Lifecycle, Reading
from agent.sources.nvml.worker import Worker
from agent.sources.nvml.xid_tally import XidTally

_LOG = logging.getLogger(__name__)

NOT_ANSWERING = "not_answering"


@dataclass(frozen=True, slots=True)
class NvmlSinks:
    """Where a watch hands what it saw.

    `on_sample` and `on_failure`, which gets a short reason to count, are called from `poll`;
    `on_xid` from a thread of its own, for a driver that reports a fault may not answer polls.
    """

    on_sample: Callable[[GpuSample], None]
    on_xid: Callable[[XidSeen], None]
    on_failure: Callable[[str], None]


class NvmlWatch:
    """Polls all GPUs. Nothing that NVML, the driver or a sink does leaves `poll`.

    NVML is called in a thread of its own. A poll waits `timeout_s` for it; what comes later is
    handed on by the poll after. One poll at a time.
    """

    def __init__(
        self,
        *,
        sinks: NvmlSinks,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        timeout_s: float = 2.0,
        event_wait_ms: int = 500,
    ) -> None:
        self._sinks = sinks
        self._clock = clock
        self._timeout_s = timeout_s
        self._tally = XidTally()
        self._lifecycle = Lifecycle(self._tally, self._xid, monotonic, event_wait_ms)
        self._worker = Worker("nvml")
        self._pending: Future[Reading] | None = None
        self._known: dict[str, GpuSample] = {}
        self._closed = False

    def poll(self, now: float) -> None:
        """Read every GPU once; `now` is Unix time. What was seen goes to the sinks."""
        if self._closed:
            return
        try:
            self._poll(now)
        except Exception:
            # A driver can answer in a way that nobody thought of, and the watch must go on.
            _LOG.exception("the poll of the GPUs failed inside the agent")
            self._miss_all(INTERNAL, now)

    def _poll(self, now: float) -> None:
        late = self._pending is not None
        if self._pending is None:
            self._pending = self._worker.submit(partial(self._lifecycle.read, now))
        try:
            reading = self._pending.result(0 if late else self._timeout_s)
        except TimeoutError:
            self._not_answered(now, late=late)
            return
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        if late:
            _LOG.info("NVML answers again")
        self._deliver(reading, now)

    def _deliver(self, reading: Reading, now: float) -> None:
        for sample in reading.samples:
            before = self._known.get(sample.gpu)
            if before is not None and before.problem is not None:
                _LOG.info("GPU %s (index %d) is read again", sample.gpu, sample.index)
            self._tell(sample)
        for gpu, reason in reading.missing.items():
            self._miss(gpu, reason, now)
        for reason in reading.failures:
            self._hand_on(self._sinks.on_failure, reason)

    def _not_answered(self, now: float, *, late: bool) -> None:
        if not late:
            _LOG.warning(
                "NVML has not answered for %.1f s; the GPUs are unknown until it does",
                self._timeout_s,
            )
        self._miss_all(NOT_ANSWERING, now)

    def _miss_all(self, reason: str, now: float) -> None:
        for gpu in list(self._known):
            self._miss(gpu, reason, now)
        self._hand_on(self._sinks.on_failure, reason)

    def _miss(self, gpu: str, reason: str, now: float) -> None:
        """Tell that a GPU could not be read; one that never was is no news about any GPU."""
        before = self._known.get(gpu)
        if before is None:
            return
        if before.problem != reason:
            _LOG.warning("GPU %s (index %d) cannot be read: %s", gpu, before.index, reason)
        self._tell(
            replace(
                before,
                at=now,
                facts={(UP.name, ()): 0.0, **self._tally.facts(gpu)},
                processes=None,
                mig_instances=(),
                problem=reason,
            )
        )

    def _tell(self, sample: GpuSample) -> None:
        self._known[sample.gpu] = sample
        self._hand_on(self._sinks.on_sample, sample)

    def _xid(
        self, gpu: str, xid: int, gpu_instance: int | None, compute_instance: int | None
    ) -> None:
        if self._closed:
            return
        at = self._clock()
        seen = XidSeen(
            gpu=gpu,
            xid=xid,
            at=at,
            count=self._tally.seen(gpu, xid, at),
            gpu_instance=gpu_instance,
            compute_instance=compute_instance,
        )
        self._hand_on(self._sinks.on_xid, seen)

    def _hand_on(self, sink: Callable[[Any], None], what: object) -> None:
        try:
            sink(what)
        except Exception:
            _LOG.exception("%r could not be handed on", what)

    def close(self) -> None:
        """Shut NVML down, waiting no longer than a poll does."""
        if self._closed:
            return
        self._closed = True
        ended = self._worker.submit(self._lifecycle.close)
        self._worker.close()
        try:
            ended.result(self._timeout_s)
        except TimeoutError:
            _LOG.warning("NVML does not answer and is left as it is")
