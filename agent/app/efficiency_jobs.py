"""EfficiencyJobs and cost of one agent's engines: what is known of each, and who is told."""

import logging
from collections.abc import Collection, Sequence

from agent.analysis.efficiency.serving import Role
from agent.analysis.efficiency.time_range import TimeRange
from agent.app.gpu_jobs import GpuJobs
from agent.app.jobs import Jobs
from agent.catalog.precision import Precision
from agent.catalog.reasons import FiguresMissing
from agent.errors import AgentError
from agent.outputs.prometheus.efficiency_board import EfficiencyBoard
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.deployment import ConfiguredGpu, EngineDeployment
from agent.pipeline.gpu_inventory import each_once
from agent.pipeline.minute_jobs import MinuteJob, Timing
from agent.records.gpu import GpuSample
from agent.records.minute import MINUTE_S
from agent.records.model import ModelShape
from agent.records.prices import PriceList
from agent.settings import EngineSettings, Settings
from agent.sources.model_config import read_model
from agent.store.minutes import MinuteStore

_LOG = logging.getLogger(__name__)

# Fewer readings than this in a row may fail before the time between them counts as unread.
_MISSED_READINGS = 3
# Engines hand in their spans every few seconds.
_SPANS_COME_S = 15.0


class EfficiencyJobs:
    """Counts the minutes of every engine."""

    def __init__(self, settings: Settings, store: MinuteStore, gpus: GpuJobs, meter: Meter) -> None:
        self.board = EfficiencyBoard()
        self._settings = settings
        self._store = store
        self._gpus = gpus
        self._meter = meter
        self._missing: set[tuple[str, str]] = set()
        prices = settings.price_list()
        self._minutes = [self._over(engine, prices) for engine in settings.engines]

    def _over(self, engine: EngineSettings, prices: PriceList) -> MinuteJob:
        proxy = self._settings.proxy
        joins_s = 0.0 if proxy.listen is None else proxy.join_wait
        timing = Timing(
            max_gap_s=_MISSED_READINGS * engine.scrape_interval,
            settle_s=_SPANS_COME_S + joins_s,
            keep_s=self._settings.storage.keep_requests,
        )
        return MinuteJob(
            self._deployment(engine, prices),
            self._store,
            self._readings,
            timing=timing,
            on_window=self.board.counted,
            on_failure=self._meter.store_failed,
        )

    def _deployment(self, engine: EngineSettings, prices: PriceList) -> EngineDeployment:
        said = engine.parallelism
        return EngineDeployment(
            engine=engine.name,
            prices=prices,
            gpus=lambda: self._gpus.inventory.samples_of(engine.name),
            missing=lambda reason, why: self._figures_missing(engine.name, reason, why),
            model=self._model(engine),
            cache_said=engine.kv_dtype is not None,
            figures=ConfiguredGpu(
                peak_flops_per_s=_scaled(engine.peak_tflops, 1e12),
                bandwidth_bytes_per_s=_scaled(engine.bandwidth_gb_per_s, 1e9),
            ),
            parallelism=None if said is None else said.parallelism(),
            role=Role(engine.role),
            named_gpus=len(engine.gpus),
        )

    def _model(self, engine: EngineSettings) -> ModelShape | None:
        if engine.model_config_path is None:
            return None
        kept = engine.kv_dtype
        cache_bits = None if kept is None else Precision(kept).bits
        try:
            model = read_model(engine.model_config_path, dtype=engine.dtype, cache_bits=cache_bits)
        except AgentError as error:
            self._figures_missing(engine.name, FiguresMissing.MODEL_CONFIG, str(error))
            return None
        for remark in model.remarks:
            _LOG.info("engine %s: %s", engine.name, remark)
        return model

    def _figures_missing(self, engine: str, reason: FiguresMissing, why: str) -> None:
        """Say once why figures of an engine are unknown or doubtful."""
        if (engine, reason) not in self._missing:
            self._missing.add((engine, reason))
            self._meter.figures_missing(engine, reason)
            _LOG.error("engine %s: efficiency or cost is unknown or doubtful: %s", engine, why)

    def _readings(self, gpus: Collection[str], window: TimeRange) -> Sequence[GpuSample]:
        """Those of the last minutes, and what is stored from before."""
        recent = self._gpus.inventory.history(gpus)
        return each_once(recent, self._store.gpu_readings(gpus, *window))

    def schedule(self, jobs: Jobs) -> None:
        """Count from now on, first of all what was missed.

        Its GPUs must be known first, which for those of the engine's processes takes a look at it:
        a minute whose GPUs are unknown when it is counted has no bill for good.
        """
        for engine, minutes in zip(self._settings.engines, self._minutes, strict=True):
            name = f"count the minutes of {engine.name}"
            at_once = self._gpus.knows_gpus_of(engine)
            jobs.every(MINUTE_S, name, minutes.count, at_once=at_once)


def _scaled(told: float | None, unit: float) -> float | None:
    return None if told is None else told * unit
