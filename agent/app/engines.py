"""What reads engines and their GPUs, and computes their minutes."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from agent.analysis.efficiency.request_activity import TimeRange
from agent.analysis.efficiency.work import Role
from agent.analysis.failures import DetectionLimits
from agent.app.jobs import Jobs
from agent.app.proxy_rotation import EngineNews
from agent.catalog import engine_facts as fact
from agent.catalog.hardware import Precision
from agent.catalog.own_health import NOT_CONFIGURED, OK
from agent.catalog.reasons import FiguresMissing, StoreWrite
from agent.errors import AgentError, StoreUnavailable
from agent.outputs.prometheus.agent_exposition import EfficiencyBoard, HostBoard
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.deployment import ConfiguredGpu, EngineDeployment
from agent.pipeline.engine_starts import EngineStarts
from agent.pipeline.explaining import MissedRequests
from agent.pipeline.gpu_inventory import GpuInventory, each_once
from agent.pipeline.minute_jobs import MinuteJob, Timing
from agent.pipeline.monitors import (
    EngineLimits,
    EngineMonitor,
    EnginePipeline,
    ScrapePublisher,
    UnclaimedGpuMonitor,
)
from agent.records.engine import EngineSample, HostSample
from agent.records.gpu import GpuSample, GpuSamples
from agent.records.minute import MINUTE_LENGTH_S
from agent.records.model import ModelShape, StoredWeights
from agent.records.prices import PriceList
from agent.settings import EngineSettings, Settings
from agent.sources.dcgm.source import DcgmSource
from agent.sources.engines.directory import EngineDirectory
from agent.sources.engines.engine_source import EngineSource, ScrapeResult
from agent.sources.engines.fetch import HealthProbe, open_session
from agent.sources.host.source import HostSource
from agent.sources.model_config import (
    ArchitectureUnknown,
    read_model,
    read_weights,
    weights_text,
)
from agent.sources.nvml.source import NvmlSource
from agent.store.minutes import MinuteStore
from agent.store.observations import ObservationStore
from agent.store.store_queries import shown_gpu

_LOG = logging.getLogger(__name__)

# Published at every poll and stored less often: a sample of each of 8 GPUs is 8 rows of 4 kB.
STORE_EVERY_S = 60.0
# What was not read for so many intervals is no figure of now.
STALE_INTERVALS = 3
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
        self.inventory = GpuInventory(
            {engine.name: engine.gpus for engine in settings.engines},
            {engine.name: engine.pod for engine in settings.engines if engine.pod is not None},
        )
        self._observations = observations
        self._meter = meter
        self._settings = settings
        self._source = source or gpu_source(settings)
        self._section = settings.nvml if settings.dcgm.url is None else settings.dcgm
        self.stored_at: float | None = None
        self._read = GpuSamples()

    def status_text(self) -> str:
        """The status of the source of GPUs, for /readyz."""
        if self._source is None:
            return NOT_CONFIGURED
        read = self._read
        if read.problem is not None:
            return read.problem
        unread = sorted({each.problem for each in read.samples if each.problem is not None})
        if unread:
            count = sum(each.problem is not None for each in read.samples)
            return f"{count} of {len(read.samples)} cannot be read: {', '.join(unread)}"
        if not read.samples and read.failures:
            return f"no GPU is read: {', '.join(sorted(set(read.failures)))}"
        return OK

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
        self._read = self._source.read(now)
        for reason in self.inventory.update(self._read, now):
            self._meter.gpu_failed(reason)

    def schedule(self, jobs: Jobs) -> None:
        """Poll and store from now on."""
        if self._source is None:
            return
        jobs.every(self._section.poll_interval, "read GPUs", self.poll)
        jobs.every(STORE_EVERY_S, "store samples of GPUs", self.store, first_in_s=0.0)

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

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The newest sample of each GPU, as the API shows it."""
        stale_after_s = STALE_INTERVALS * self._section.poll_interval
        return [
            {**shown_gpu(self._settings.name, sample), "stale_after_s": stale_after_s}
            for sample in self.inventory.newest()
        ]

    def close(self) -> None:
        """Close the source."""
        if self._source is not None:
            self._source.close()


def gpu_source(settings: Settings) -> GpuSource | None:
    """The source that the settings choose; None if GPUs are not read."""
    if settings.dcgm.url is not None:
        fields = [row.field() for row in settings.dcgm.fields]
        return DcgmSource(
            url=settings.dcgm.url, extra_fields=fields, ca=settings.tls.ca, pod=settings.dcgm.pod
        )
    return NvmlSource() if settings.reads_nvml else None


# After this many missed scrapes in a row, the time between two samples counts as unread.
_MISSED_SCRAPES = 3
# Engines export their spans every few seconds.
_SPANS_COME_S = 15.0


class EfficiencyJobs:
    """Computes the minutes of every engine. Each engine has a job of its own."""

    def __init__(self, settings: Settings, store: MinuteStore, gpus: GpuJobs, meter: Meter) -> None:
        self.board = EfficiencyBoard()
        self._settings = settings
        self._store = store
        self._gpus = gpus
        self._meter = meter
        self._missing: set[tuple[str, str]] = set()
        self._model_problems: dict[str, str] = {}
        prices = settings.price_list()
        # At once: their file systems may hang, each for seconds.
        with ThreadPoolExecutor(32) as readers:
            models = list(readers.map(self._model, settings.engines))
        pairs = zip(settings.engines, models, strict=True)
        self._with_model = frozenset(
            engine.name for engine, model in pairs if isinstance(model, ModelShape)
        )
        self._jobs = [
            self._job(engine, model, prices)
            for engine, model in zip(settings.engines, models, strict=True)
        ]

    def has_model(self, engine: str) -> bool:
        """Whether the engine's model could be read."""
        return engine in self._with_model

    def model_problem(self, engine: str) -> str | None:
        """Why not all of the engine's model is known; None if it is, or if no file was read."""
        return self._model_problems.get(engine)

    def _job(
        self, engine: EngineSettings, model: ModelShape | StoredWeights | None, prices: PriceList
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
            on_minute=self.board.add,
            on_failure=self._meter.store_failed,
        )

    def _deployment(
        self, engine: EngineSettings, model: ModelShape | StoredWeights | None, prices: PriceList
    ) -> EngineDeployment:
        spread = engine.parallelism
        return EngineDeployment(
            engine=engine.name,
            prices=prices,
            gpus=lambda: self._gpus.inventory.samples_of(engine.name),
            missing=lambda reason, why: self._figures_missing(engine.name, reason, why),
            model=model if isinstance(model, ModelShape) else None,
            weights=model if isinstance(model, StoredWeights) else None,
            cache_configured=engine.kv_dtype is not None,
            configured_gpu=ConfiguredGpu(
                peak_flops_per_s=_scaled(engine.peak_tflops, 1e12),
                bandwidth_bytes_per_s=_scaled(engine.bandwidth_gb_per_s, 1e9),
            ),
            parallelism=None if spread is None else spread.parallelism(),
            role=Role(engine.role),
            named_gpus=len(engine.gpus),
        )

    def _model(self, engine: EngineSettings) -> ModelShape | StoredWeights | None:
        """The model; of an unknown architecture what its files tell."""
        path = engine.model_config_path
        if path is None:
            return None
        cache_bits = None if engine.kv_dtype is None else Precision(engine.kv_dtype).bits
        try:
            model = read_model(path, dtype=engine.dtype, cache_bits=cache_bits)
        except ArchitectureUnknown as error:
            self._model_is_unknown(engine.name, error)
            # A configured format is not that of the files.
            return self._weights(engine.name, path, error) if engine.dtype is None else None
        except AgentError as error:
            self._model_is_unknown(engine.name, error)
            return None
        for remark in model.remarks:
            _LOG.info("engine %s: %s", engine.name, remark)
        return model

    def _weights(
        self, engine: str, path: Path, unknown: ArchitectureUnknown
    ) -> StoredWeights | None:
        weights = read_weights(path, unknown)
        if weights is not None:
            self._model_problems[engine] = weights_text(unknown, weights)
        if weights is not None and weights.why_unknown is not None:
            _LOG.warning("engine %s: MBU of decode is unknown: %s", engine, weights.why_unknown)
        elif weights is not None:
            _LOG.info("engine %s: %s", engine, "; ".join(weights.remarks))
        return weights

    def _model_is_unknown(self, engine: str, error: AgentError) -> None:
        self._model_problems[engine] = str(error)
        self._figures_missing(engine, FiguresMissing.MODEL_CONFIG, str(error))

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
        """Run each engine's job every minute; it computes missed minutes first.

        The first run waits a minute if the engine's GPUs are found by its processes. A minute
        whose GPUs are unknown when it is computed never gets a bill.
        """
        for engine, job in zip(self._settings.engines, self._jobs, strict=True):
            name = f"compute the minutes of {engine.name}"
            first_in_s = 0.0 if self._gpus.knows_gpus_of(engine) else None
            jobs.every(MINUTE_LENGTH_S, name, job.compute, first_in_s=first_in_s)


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


# A clock that is set a little while the agent starts.
_AHEAD_S = 60.0

# Of an engine's load, by field of the API's response.
_LOAD = {
    "running": fact.REQUESTS_RUNNING,
    "waiting": fact.REQUESTS_WAITING,
    "kv_cache_usage": fact.KV_CACHE_USAGE,
}


def engine_row(
    name: str, sample: EngineSample | None, directory: EngineDirectory, problem: str | None
) -> Mapping[str, Any]:
    """An engine as the API shows it; without a sample it is not up, and its load is unknown."""
    load = {field: sample and sample.fact(each.name) for field, each in _LOAD.items()}
    if sample is None:
        model = directory.model_of(name)
        seen = {"up": False, "problem": problem, "model": model, "dialect": None, "read_at": None}
        return {"name": name, **seen, **load}
    facts = {"model": sample.model, "dialect": sample.dialect, "read_at": sample.at}
    return {"name": name, "up": True, **facts, **load}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSources:
    """What reads one engine; `monotonic` is a clock in seconds that is never set."""

    read_engine: Callable[[float], ScrapeResult]
    read_health: Callable[[], int | None]
    read_host: Callable[[float], HostSample]
    monotonic: Callable[[], float]
    close_host: Callable[[], None] | None = None


SourcesOf = Callable[[EngineSettings, EngineSample | None], EngineSources]


def live_sources(
    ca: Path | None, engine: EngineSettings, before: EngineSample | None
) -> EngineSources:
    """The readers of an engine that runs; `ca` is a file of authorities that it is trusted by."""
    session = open_session(ca)
    source = EngineSource(
        name=engine.name, url=engine.url, kind=engine.kind, session=session, before=before
    )
    host = HostSource(
        url=engine.url, pids=engine.pids, log=engine.log, same_machine=engine.same_machine
    )
    return EngineSources(
        read_engine=source.read,
        read_health=HealthProbe(engine.url, session).status,
        read_host=host.read,
        close_host=host.close,
        monotonic=time.monotonic,
    )


class EngineMonitors:
    """Builds monitors that share one store, one exposition and the GPUs of one machine."""

    def __init__(
        self,
        observations: ObservationStore,
        minutes: MinuteStore,
        meter: Meter,
        gpus: GpuJobs,
        hosts: HostBoard,
        *,
        missed: MissedRequests | None = None,
        news: EngineNews | None = None,
        starts: EngineStarts | None = None,
        sources: SourcesOf | None = None,
    ) -> None:
        """`news` learns what the polls find, and `starts` when engines become ready.

        `sources` makes the readers of one engine.
        """
        self._starts = starts or EngineStarts()
        self._missed = missed
        self._news = news or EngineNews(time.time)
        self._sources = sources or partial(live_sources, None)
        self._observations = observations
        self._minutes = minutes
        self._meter = meter
        self._gpus = gpus
        self._hosts = hosts
        self._pipelines: list[EnginePipeline] = []
        self._scrapes: dict[str, ScrapeResult] = {}
        self._dialects: dict[str, str] = {}

    def failure_of(self, engine: str) -> str | None:
        """Why the last scrape of an engine failed, in a word; None if it did not."""
        last = self._scrapes.get(engine)
        return None if last is None else last.failure

    def problem_of(self, engine: str) -> str | None:
        """Why the last scrape of an engine failed, as a sentence; None if it did not."""
        last = self._scrapes.get(engine)
        return None if last is None else last.problem

    def dialect_of(self, engine: str) -> str | None:
        """The dialect of an engine's last sample since the start; None before the first."""
        return self._dialects.get(engine)

    def fill(self) -> float:
        """The largest share of an engine's room for waiting events that is taken."""
        return max(pipeline.fill for pipeline in self._pipelines)

    def stored_at(self) -> float | None:
        """The time of the newest sample of any engine that was stored."""
        known = (pipeline.stored_at for pipeline in self._pipelines)
        return max((at for at in known if at is not None), default=None)

    def pipeline(self) -> EnginePipeline:
        """A way of samples and events to the store."""
        pipeline = EnginePipeline(self._observations, self._meter, self._missed)
        self._pipelines.append(pipeline)
        return pipeline

    def of_engine(self, engine: EngineSettings, directory: EngineDirectory) -> EngineMonitor:
        """The monitor of one engine."""
        pipeline = self.pipeline()
        limits = EngineLimits(engine.limits.by_fact())

        def on_host(name: str, sample: HostSample) -> None:
            limits.host_sample(sample)
            self._hosts.sample(name, sample)
            if self._missed is not None:
                self._missed.on_host(name, sample)

        def on_scrape(result: ScrapeResult) -> None:
            publisher.publish(result)
            self._news.scraped(engine.name, result)
            self._scrapes[engine.name] = result
            if result.sample is not None:
                self._dialects[engine.name] = result.sample.dialect

        publisher = ScrapePublisher(engine.name, pipeline, self._meter, directory, limits)
        before = self._before(engine.name, time.time())
        # An engine that is down now still serves its model.
        directory.learn_model(engine.name, None if before is None else before.model)
        sources = self._sources(engine, before)
        return EngineMonitor(
            engine.name,
            read_engine=sources.read_engine,
            read_health=self._news.reading_health(engine.name, sources.read_health),
            read_host=sources.read_host,
            close_host=sources.close_host,
            gpus=self._gpus.inventory,
            limits=limits_of(engine),
            on_scrape=on_scrape,
            on_host=on_host,
            on_event=self._news.also_to(pipeline.event),
            store=pipeline.store,
            monotonic=sources.monotonic,
            starts=self._starts.of(engine.name),
            before=before,
        )

    def of_unclaimed_gpus(self) -> UnclaimedGpuMonitor:
        """The monitor of the GPUs that belong to no engine."""
        pipeline = self.pipeline()
        return UnclaimedGpuMonitor(
            self._gpus.inventory,
            on_event=pipeline.event,
            store=pipeline.store,
            monotonic=time.monotonic,
        )

    def _before(self, engine: str, now: float) -> EngineSample | None:
        """The last sample of an engine that the last run of the agent stored."""
        try:
            # If the clock was set back since, samples in the future are the oldest.
            return self._minutes.newest_sample(engine, now + _AHEAD_S)
        except StoreUnavailable as error:
            _LOG.warning("a restart of engine %s since the last run is missed: %s", engine, error)
            return None


def limits_of(engine: EngineSettings) -> DetectionLimits:
    """The usual limits, or wider ones if polls are so rare that few fit into them."""
    usual = DetectionLimits(hang_s=engine.hang_after)
    return replace(
        usual,
        clue_s=max(usual.clue_s, 2 * engine.scrape_interval),
        quiet_s=max(usual.quiet_s, 3 * engine.scrape_interval),
    )
