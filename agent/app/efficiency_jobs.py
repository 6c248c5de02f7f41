"""The jobs that book the minutes of an agent's engines, and what each engine's figures need."""

import logging
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from agent.analysis.efficiency.serving import Role
from agent.analysis.efficiency.time_range import TimeRange
from agent.app.gpu_jobs import GpuJobs
from agent.app.jobs import Jobs
from agent.catalog.hardware import Precision
from agent.catalog.reasons import FiguresMissing
from agent.errors import AgentError
from agent.outputs.prometheus.boards import EfficiencyBoard
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.deployment import ConfiguredGpu, EngineDeployment
from agent.pipeline.gpu_inventory import each_once
from agent.pipeline.minute_jobs import MinuteJob, Timing
from agent.records.gpu import GpuSample
from agent.records.minute import BOOK_EVERY_S
from agent.records.model import ModelShape
from agent.records.prices import PriceList
from agent.settings import EngineSettings, Settings
from agent.sources.model_config import read_model
from agent.store.minutes import MinuteStore

_LOG = logging.getLogger(__name__)

# After this many missed scrapes in a row, the time between two samples counts as unread.
_MISSED_SCRAPES = 3
# Engines export their spans every few seconds.
_SPANS_COME_S = 15.0


class EfficiencyJobs:
    """Books the minutes of every engine. Each engine has a job of its own."""

    def __init__(self, settings: Settings, store: MinuteStore, gpus: GpuJobs, meter: Meter) -> None:
        self.board = EfficiencyBoard()
        self._settings = settings
        self._store = store
        self._gpus = gpus
        self._meter = meter
        self._missing: set[tuple[str, str]] = set()
        prices = settings.price_list()
        # At once: their file systems may hang, each for seconds.
        with ThreadPoolExecutor(32) as readers:
            models = list(readers.map(self._model, settings.engines))
        self._jobs = [
            self._job(engine, model, prices)
            for engine, model in zip(settings.engines, models, strict=True)
        ]

    def _job(
        self, engine: EngineSettings, model: ModelShape | None, prices: PriceList
    ) -> MinuteJob:
        proxy = self._settings.proxy
        joins_s = 0.0 if proxy.listen is None else proxy.join_wait
        timing = Timing(
            max_gap_s=_MISSED_SCRAPES * engine.scrape_interval,
            settle_s=_SPANS_COME_S + joins_s,
            keep_s=self._settings.storage.keep_requests,
        )
        return MinuteJob(
            self._deployment(engine, model, prices),
            self._store,
            self._gpu_samples,
            timing=timing,
            on_minute=self.board.booked,
            on_failure=self._meter.store_failed,
        )

    def _deployment(
        self, engine: EngineSettings, model: ModelShape | None, prices: PriceList
    ) -> EngineDeployment:
        spread = engine.parallelism
        return EngineDeployment(
            engine=engine.name,
            prices=prices,
            gpus=lambda: self._gpus.inventory.samples_of(engine.name),
            missing=lambda reason, why: self._figures_missing(engine.name, reason, why),
            model=model,
            cache_configured=engine.kv_dtype is not None,
            configured_gpu=ConfiguredGpu(
                peak_flops_per_s=_scaled(engine.peak_tflops, 1e12),
                bandwidth_bytes_per_s=_scaled(engine.bandwidth_gb_per_s, 1e9),
            ),
            parallelism=None if spread is None else spread.parallelism(),
            role=Role(engine.role),
            named_gpus=len(engine.gpus),
        )

    def _model(self, engine: EngineSettings) -> ModelShape | None:
        if engine.model_config_path is None:
            return None
        cache_bits = None if engine.kv_dtype is None else Precision(engine.kv_dtype).bits
        try:
            model = read_model(engine.model_config_path, dtype=engine.dtype, cache_bits=cache_bits)
        except AgentError as error:
            self._figures_missing(engine.name, FiguresMissing.MODEL_CONFIG, str(error))
            return None
        for remark in model.remarks:
            _LOG.info("engine %s: %s", engine.name, remark)
        return model

    def _figures_missing(self, engine: str, reason: FiguresMissing, why: str) -> None:
        """Log and count once why figures of an engine are unknown or doubtful."""
        if (engine, reason) not in self._missing:
            self._missing.add((engine, reason))
            self._meter.figures_missing(engine, reason)
            _LOG.error("engine %s: efficiency or cost is unknown or doubtful: %s", engine, why)

    def _gpu_samples(self, gpus: Collection[str], time: TimeRange) -> Sequence[GpuSample]:
        """All samples of the last minutes, and the stored ones of `time`."""
        recent = self._gpus.inventory.history(gpus)
        return each_once(recent, self._store.gpu_samples(gpus, *time))

    def schedule(self, jobs: Jobs) -> None:
        """Run each engine's job every minute; it books missed minutes first.

        The first run waits a minute where the engine's GPUs are found by its processes. A minute
        whose GPUs are unknown when it is booked never gets a bill.
        """
        for engine, job in zip(self._settings.engines, self._jobs, strict=True):
            name = f"book the minutes of {engine.name}"
            at_once = self._gpus.knows_gpus_of(engine)
            jobs.every(BOOK_EVERY_S, name, job.book, at_once=at_once)


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit
