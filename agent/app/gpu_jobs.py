"""The GPUs of one agent: where they are read, and who is told."""

import logging
from collections.abc import Sequence
from typing import Protocol

from agent.app.jobs import Jobs
from agent.catalog.gpu_problems import UNSEEN
from agent.catalog.reasons import StoreWrite
from agent.errors import StoreUnavailable
from agent.outputs.prometheus.gpu_gauges import GpuBoard
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.gpu_history import GpuHistory
from agent.pipeline.gpu_links import GpuLinks
from agent.pipeline.lost_gpus import GPU_MISSING, LostGpus
from agent.records.gpu import GpuSample, XidSeen
from agent.settings import Settings
from agent.sources.dcgm.watch import DcgmSinks, DcgmWatch
from agent.sources.nvml.watch import NvmlSinks, NvmlWatch
from agent.store.observations import ObservationStore

_LOG = logging.getLogger(__name__)

# Readings are shown at every poll and stored less often: one of eight GPUs is 8 rows of 4 kB.
KEEP_EVERY_S = 60.0
# A GPU that was not read for so long was taken out, and nobody waits for it.
REMEMBER_S = 7 * 86400.0
# As sources say it when they work and find none.
NO_GPU = "no_gpu"


class GpuSource(Protocol):
    """Reads GPUs and tells its sinks."""

    def poll(self, now: float) -> None:
        """Read all GPUs once."""

    def close(self) -> None:
        """Let go of them."""


class Gpus:
    """What is seen of GPUs, by whichever source the settings name; none is one too."""

    def __init__(self, settings: Settings, observations: ObservationStore, meter: Meter) -> None:
        self.board = GpuBoard()
        self.links = GpuLinks({engine.name: engine.gpus for engine in settings.engines})
        self.history = GpuHistory()
        self._lost = LostGpus()
        self._gone: set[str] = set()
        self._checked = False
        self._observations = observations
        self._meter = meter
        self._settings = settings
        self._source = self._opened()

    @property
    def known(self) -> bool:
        """Whether its source has told which GPUs there are, or there is no source to wait for."""
        return self._source is None or self._lost.answered

    def _opened(self) -> GpuSource | None:
        dcgm = self._settings.dcgm
        if dcgm.url is not None:
            return DcgmWatch(
                url=dcgm.url,
                sinks=DcgmSinks(on_sample=self._sample, on_xid=self._xid, on_failure=self._failure),
                extra_fields=[row.field() for row in dcgm.fields],
            )
        if self._settings.reads_nvml:
            sinks = NvmlSinks(on_sample=self._sample, on_xid=self._xid, on_failure=self._failure)
            return NvmlWatch(sinks=sinks)
        return None

    def _sample(self, sample: GpuSample) -> None:
        self._lost.sample(sample)
        self._tell(sample)

    def _tell(self, sample: GpuSample) -> None:
        self.board.sample(sample)
        self.links.sample(sample)
        self.history.sample(sample)

    def _xid(self, seen: XidSeen) -> None:
        _LOG.warning("GPU %s reports Xid %d, for the %d. time", seen.gpu, seen.xid, seen.count)
        self.links.xid(seen)

    def _failure(self, reason: str) -> None:
        if reason == NO_GPU:
            self._lost.none_there()
        elif reason in UNSEEN:
            self._lost.none_seen(reason)
        self._meter.gpu_failed(reason)

    def look_first(self, now: float) -> None:
        """Read them once, with those in mind that an earlier run read."""
        if self._source is None:
            return
        self._remember(now)
        self._poll(now)

    def _remember(self, now: float) -> None:
        try:
            self._lost = LostGpus(self._observations.gpus_read_since(now - REMEMBER_S))
        except StoreUnavailable as error:
            _LOG.warning("GPUs that are gone since the last run are not noticed: %s", error)

    def _poll(self, now: float) -> None:
        assert self._source is not None, "nothing is polled without a source"
        self._source.poll(now)
        self._tell_lost(now)
        if self._lost.answered and not self._checked:
            self._checked = True
            self._check_settings()

    def _tell_lost(self, now: float) -> None:
        for sample in self._lost.unseen(now):
            # Nothing is known of these GPUs, so that no engine hears of it.
            self.board.sample(sample)
        lost = self._lost.lost(now)
        if lost and not self._gone:
            self.links.count_as_before(self._lost.before())
        for sample in lost:
            if sample.gpu not in self._gone:
                _LOG.error("GPU %s (index %d) was there and is gone", sample.gpu, sample.index)
            self._tell(sample)
        self._gone = {sample.gpu for sample in lost}
        if lost:
            self._meter.gpu_failed(GPU_MISSING)
        for gpu in self._lost.not_missed():
            _LOG.info("GPU %s is not missed any more: there are others", gpu)
            self.board.forget(gpu)
            self.links.forget(gpu)

    def _check_settings(self) -> None:
        """Name the GPUs of the settings that are not there, once the source has answered."""
        for engine, gpus in self.links.missing().items():
            for gpu in gpus:
                self._meter.gpu_failed("not_there")
                _LOG.error(
                    "engine %s: its GPU %r is not there; %s", engine, gpu, _there(self.links.seen())
                )
        for engine, indexes in self.links.shared().items():
            for index in indexes:
                self._meter.gpu_failed("index_shared")
                _LOG.error(
                    "engine %s: GPUs of several hosts have the index %s, and none is taken for its "
                    "own; name it by its UUID: %s",
                    *(engine, index, _there(self.links.seen())),
                )

    def schedule(self, jobs: Jobs) -> None:
        """Read and store them from now on."""
        if self._source is None:
            return
        reads_dcgm = self._settings.dcgm.url is not None
        section = self._settings.dcgm if reads_dcgm else self._settings.nvml
        jobs.every(section.poll_interval, "read GPUs", self._poll)
        jobs.every(KEEP_EVERY_S, "store GPU readings", self._keep, at_once=True)

    def _keep(self, _now: float) -> None:
        try:
            self._observations.write_gpu_samples(self.board.newest())
        except StoreUnavailable as error:
            _LOG.warning("readings of GPUs are not stored: %s", error)
            self._meter.store_failed(StoreWrite.GPU_SAMPLES)

    def close(self) -> None:
        """Let go of the GPUs."""
        if self._source is not None:
            self._source.close()


def _there(gpus: Sequence[str]) -> str:
    return f"there are {', '.join(gpus)}" if gpus else "no GPU can be seen"
