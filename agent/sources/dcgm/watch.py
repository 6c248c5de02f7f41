"""The watch over all GPUs that a dcgm-exporter shows: a sample of each at a poll."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from agent.catalog.dcgm_fields import DCGM_FIELDS, DcgmField
from agent.catalog.gpu_facts import ENERGY, UP
from agent.catalog.reasons import PageFault
from agent.errors import EngineUnreachable, PageUnreadable
from agent.records.gpu import Facts, GpuSample, XidSeen
from agent.sources.dcgm.readings import GpuReading, Readings, read_gpus, wanted_series
from agent.sources.dcgm.xids import XidCounts
from agent.sources.engines.exposition import read_exposition
from agent.sources.engines.fetch import fetch, open_session

_LOG = logging.getLogger(__name__)

_PATH = "/metrics"
GPU_MISSING = "gpu_missing"
GPU_SILENT = "gpu_silent"
NO_GPU = "no_gpu"
EXPORTER_STALE = "exporter_stale"

# An energy counter moves all the time, and exporters read theirs every 30 s unless set otherwise.
STALE_AFTER_S = 600.0


@dataclass(frozen=True, slots=True)
class DcgmSinks:
    """Where a watch hands what it saw, always from `poll`.

    `on_failure` gets a short reason to count: once for a poll that failed, and once for each
    reason for which a poll missed a GPU, or dropped something and went on.
    """

    on_sample: Callable[[GpuSample], None]
    on_xid: Callable[[XidSeen], None]
    on_failure: Callable[[str], None]


class DcgmWatch:
    """Polls all GPUs on one exporter's page. Nothing that the page or a sink does leaves `poll`.

    The exporter reads its GPUs at an interval of its own, 30 s unless set otherwise, and does not
    tell when: a sample's numbers are up to that much older than its `at`, which is the time of the
    poll, and so is an Xid. Polls in between see the same numbers again. One poll at a time.
    """

    def __init__(
        self,
        *,
        url: str,
        sinks: DcgmSinks,
        extra_fields: Sequence[DcgmField] = (),
        timeout_s: float = 4.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Of `url` the path may be left out. `extra_fields` come before those that are built in."""
        self._url = url if urlsplit(url).path.strip("/") else url.rstrip("/") + _PATH
        self._sinks = sinks
        self._timeout_s = timeout_s
        self._fields = (*extra_fields, *DCGM_FIELDS)
        self._wanted = wanted_series(self._fields)
        self._session = open_session()
        self._xids = XidCounts()
        self._known: dict[str, GpuSample] = {}
        self._monotonic = monotonic
        self._moved: dict[str, tuple[Facts, float]] = {}
        self._failing: str | None = None
        self._closed = False

    def poll(self, now: float) -> None:
        """Read every GPU once; `now` is Unix time. What was seen goes to the sinks."""
        if self._closed:
            return
        try:
            self._deliver(self._read(), now)
        except (EngineUnreachable, PageUnreadable) as error:
            self._fail(f"exporter_{error.reason}", str(error), now)
        except Exception:
            # A page can be broken in a way that nobody thought of, and the watch must go on.
            _LOG.exception("the poll of dcgm-exporter failed inside the agent")
            self._miss_unread("internal", now)
            self._hand_on(self._sinks.on_failure, "internal")

    def _read(self) -> Readings:
        page = read_exposition(
            fetch(self._session, self._url, timeout_s=self._timeout_s), self._wanted
        )
        if not page.series:
            raise PageUnreadable(
                PageFault.NO_KNOWN_SERIES,
                "the page tells nothing of a GPU that the agent knows the name of",
            )
        return read_gpus(page, self._fields, self._known)

    def _deliver(self, readings: Readings, now: float) -> None:
        if self._failing is not None:
            _LOG.info("dcgm-exporter can be read again")
            self._failing = None
        missing = dict.fromkeys(self._known, GPU_MISSING)
        for gpu in readings.gpus:
            self._tell_xids(gpu, now)
            if gpu.silent:
                missing[gpu.gpu] = GPU_SILENT
            elif self._stands_still(gpu):
                missing[gpu.gpu] = EXPORTER_STALE
            else:
                missing.pop(gpu.gpu, None)
                self._tell(self._sample(gpu, now))
        for uuid, problem in missing.items():
            self._miss(uuid, problem, now)
        reasons = {*missing.values(), *readings.dropped}
        if not readings.gpus:
            reasons.add(NO_GPU)
        for reason in sorted(reasons):
            self._hand_on(self._sinks.on_failure, reason)

    def _stands_still(self, gpu: GpuReading) -> bool:
        """Whether the page has told the same of a GPU for long, though its counter must move."""
        at = self._monotonic()
        facts, since = self._moved.get(gpu.gpu, ({}, at))
        if facts != gpu.facts:
            facts, since = gpu.facts, at
        self._moved[gpu.gpu] = facts, since
        return bool(facts.get((ENERGY.name, ()))) and at - since > STALE_AFTER_S

    def _tell_xids(self, gpu: GpuReading, now: float) -> None:
        for xid, count in self._xids.read(gpu.gpu, gpu.xids, now).items():
            seen = XidSeen(gpu=gpu.gpu, xid=xid, at=now, count=count)
            self._hand_on(self._sinks.on_xid, seen)

    def _sample(self, gpu: GpuReading, now: float) -> GpuSample:
        before = self._known.get(gpu.gpu)
        if before is not None and before.problem is not None:
            _LOG.info("GPU %s (index %d) is read again", gpu.gpu, gpu.index)
        return GpuSample(
            gpu=gpu.gpu,
            index=gpu.index,
            name=gpu.name,
            at=now,
            facts={(UP.name, ()): 1.0, **gpu.facts, **self._xids.facts(gpu.gpu)},
            mig_instances=gpu.instances,
        )

    def _fail(self, reason: str, message: str, now: float) -> None:
        if reason != self._failing:
            _LOG.warning("no GPU is read from dcgm-exporter: %s", message)
            self._failing = reason
        self._miss_unread(reason, now)
        self._hand_on(self._sinks.on_failure, reason)

    def _miss_unread(self, reason: str, now: float) -> None:
        """Miss every GPU that this poll has not told yet."""
        for uuid, sample in list(self._known.items()):
            if sample.at != now:
                self._miss(uuid, reason, now)

    def _miss(self, uuid: str, reason: str, now: float) -> None:
        """Tell that a GPU could not be read; one that never was is no news about any GPU."""
        before = self._known.get(uuid)
        if before is None:
            return
        if before.problem != reason:
            _LOG.warning("GPU %s (index %d) cannot be read: %s", uuid, before.index, reason)
        self._tell(
            replace(
                before,
                at=now,
                facts={(UP.name, ()): 0.0, **self._xids.facts(uuid)},
                mig_instances=(),
                problem=reason,
            )
        )

    def _tell(self, sample: GpuSample) -> None:
        self._known[sample.gpu] = sample
        self._hand_on(self._sinks.on_sample, sample)

    def _hand_on(self, sink: Callable[[Any], None], what: object) -> None:
        try:
            sink(what)
        except Exception:
            _LOG.exception("%r could not be handed on", what)

    def close(self) -> None:
        """Tell nothing more, and let go of the connections."""
        self._closed = True
        self._session.close()
