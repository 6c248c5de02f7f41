"""The jobs that read GPUs and store their samples, and the source that the settings choose."""

import logging
from typing import Protocol

from agent.app.jobs import Jobs
from agent.catalog.reasons import StoreWrite
from agent.errors import StoreUnavailable
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.gpu_inventory import GpuInventory
from agent.records.gpu import GpuSamples
from agent.settings import EngineSettings, Settings
from agent.sources.dcgm.source import DcgmSource
from agent.sources.nvml.source import NvmlSource
from agent.store.observations import ObservationStore

_LOG = logging.getLogger(__name__)

# Published at every poll and stored less often: a sample of each of 8 GPUs is 8 rows of 4 kB.
STORE_EVERY_S = 60.0
# A GPU that was not read for a week was taken out.
REMEMBER_S = 7 * 86400.0


class GpuSource(Protocol):
    """Reads GPUs."""

    def read(self, now: float) -> GpuSamples:
        """Read all GPUs once; `now` is Unix time. Raises nothing."""

    def close(self) -> None:
        """Free what the source holds."""


class GpuJobs:
    """Reads the GPUs into `inventory`. Without a source in the settings there is nothing to do."""

    def __init__(
        self,
        settings: Settings,
        observations: ObservationStore,
        meter: Meter,
        source: GpuSource | None = None,
    ) -> None:
        """`source` replaces the one that the settings choose."""
        self.inventory = GpuInventory({engine.name: engine.gpus for engine in settings.engines})
        self._observations = observations
        self._meter = meter
        self._settings = settings
        self._source = source or gpu_source(settings)
        self.stored_at: float | None = None

    def knows_gpus_of(self, engine: EngineSettings) -> bool:
        """Whether the engine's GPUs are known without its processes."""
        is_read = self._source is None or self.inventory.answered
        return is_read and (bool(engine.gpus) or not self.inventory.newest())

    def read_first(self, now: float) -> None:
        """Read the GPUs once, and compare them with those that an earlier run read."""
        if self._source is None:
            return
        try:
            self.inventory.remember(self._observations.gpus_read_since(now - REMEMBER_S))
        except StoreUnavailable as error:
            _LOG.warning("GPUs that are gone since the last run are not noticed: %s", error)
        self.poll(now)

    def poll(self, now: float) -> None:
        """Read all GPUs once."""
        assert self._source is not None, "nothing is polled without a source"
        for reason in self.inventory.update(self._source.read(now), now):
            self._meter.gpu_failed(reason)

    def schedule(self, jobs: Jobs) -> None:
        """Poll and store from now on."""
        if self._source is None:
            return
        reads_dcgm = self._settings.dcgm.url is not None
        section = self._settings.dcgm if reads_dcgm else self._settings.nvml
        jobs.every(section.poll_interval, "read GPUs", self.poll)
        jobs.every(STORE_EVERY_S, "store samples of GPUs", self.store, at_once=True)

    def store(self, _now: float) -> None:
        """Store the newest sample of each GPU."""
        samples = self.inventory.newest()
        try:
            self._observations.write_gpu_samples(samples)
        except StoreUnavailable as error:
            _LOG.warning("samples of GPUs are not stored: %s", error)
            self._meter.store_failed(StoreWrite.GPU_SAMPLES)
        else:
            self.stored_at = max((sample.at for sample in samples), default=self.stored_at)

    def close(self) -> None:
        """Close the source."""
        if self._source is not None:
            self._source.close()


def gpu_source(settings: Settings) -> GpuSource | None:
    """The source that the settings choose; None where GPUs are not read."""
    if settings.dcgm.url is not None:
        fields = [row.field() for row in settings.dcgm.fields]
        return DcgmSource(url=settings.dcgm.url, extra_fields=fields, ca=settings.tls.ca)
    return NvmlSource() if settings.reads_nvml else None
