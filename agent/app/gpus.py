"""The GPUs of one agent: where they are read, and who is told."""

import logging
from collections.abc import Sequence
from typing import Protocol

from agent.app.jobs import Jobs
from agent.catalog.reasons import StoreWrite
from agent.errors import StoreUnavailable
from agent.outputs.prometheus.gpus import GpuBoard
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.gpu_history import GpuHistory
from agent.pipeline.gpu_links import GpuLinks
from agent.pipeline.lost_gpus import GPU_MISSING, LostGpus
from agent.records.gpu import GpuSample, XidSeen
from agent.settings import Settings
from agent.sources.dcgm.watch import DcgmSinks, DcgmWatch
from agent.sources.nvml.watch import NvmlSinks, NvmlWatch
from agent.store.keeping import Keeper

_LOG = logging.getLogger(__name__)

# Readings are shown at every poll and stored less often: one of eight GPUs is 8 rows of 4 kB.
KEEP_EVERY_S = 60.0
# A GPU that was not read for so long was taken out, and nobody waits for it.
REMEMBER_S = 7 * 86400.0


class GpuSource(Protocol):
    """Reads GPUs and tells its sinks."""

    def poll(self, now: float) -> None:
        """Read all GPUs once."""

    def close(self) -> None:
        """Let go of them."""


class Gpus:
    """What is seen of GPUs, by whichever source the settings name; none is one too."""

    def __init__(self, settings: Settings, keeper: Keeper, meter: Meter) -> None:
        self.board = GpuBoard()
        self.links = GpuLinks({engine.name: engine.gpus for engine in settings.engines})
        self.history = GpuHistory()
        self._lost = LostGpus()
        self._keeper = keeper
        self._meter = meter
        self._settings = settings
        self._source = self._opened()

    def _opened(self) -> GpuSource | None:
        dcgm = self._settings.dcgm
        if dcgm.url is not None:
            return DcgmWatch(
                url=dcgm.url,
                sinks=DcgmSinks(
                    on_sample=self._sample, on_xid=self._xid, on_failure=self._meter.gpu_failed
                ),
                extra_fields=[row.field() for row in dcgm.fields],
            )
        if self._settings.reads_nvml:
            sinks = NvmlSinks(
                on_sample=self._sample, on_xid=self._xid, on_failure=self._meter.gpu_failed
            )
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

    def look_first(self, now: float) -> None:
        """Read them once, and say which GPUs of before and of the settings are not there."""
        if self._source is None:
            return
        self._remember(now)
        self._poll(now)
        for sample in self._lost.lost(now):
            _LOG.error("GPU %s (index %d) was there and is gone", sample.gpu, sample.index)
        for engine, gpus in self.links.missing().items():
            for gpu in gpus:
                self._meter.gpu_failed("not_there")
                _LOG.error(
                    "engine %s: its GPU %r is not there; %s", engine, gpu, _there(self.links.seen())
                )

    def _remember(self, now: float) -> None:
        try:
            self._lost = LostGpus(self._keeper.gpus_read_since(now - REMEMBER_S))
        except StoreUnavailable as error:
            _LOG.warning("GPUs that are gone since the last run are not noticed: %s", error)

    def _poll(self, now: float) -> None:
        assert self._source is not None, "nothing is polled without a source"
        self._source.poll(now)
        lost = self._lost.lost(now)
        for sample in lost:
            self._tell(sample)
        if lost:
            self._meter.gpu_failed(GPU_MISSING)

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
            self._keeper.keep_gpu_samples(self.board.newest())
        except StoreUnavailable as error:
            _LOG.warning("readings of GPUs are not stored: %s", error)
            self._meter.store_failed(StoreWrite.GPU_SAMPLES)

    def close(self) -> None:
        """Let go of the GPUs."""
        if self._source is not None:
            self._source.close()


def _there(gpus: Sequence[str]) -> str:
    return f"there are {', '.join(gpus)}" if gpus else "no GPU can be seen"
