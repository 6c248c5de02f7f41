"""Builds the monitor of each engine and of GPUs without one, and the API's row of an engine."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent.analysis.failures import DetectionLimits
from agent.app.gpu_jobs import GpuJobs
from agent.app.proxy_rotation import EngineNews
from agent.catalog import engine_facts as fact
from agent.errors import StoreUnavailable
from agent.outputs.prometheus.boards import HostBoard
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.engine_limits import EngineLimits
from agent.pipeline.engine_pipeline import EnginePipeline, ScrapePublisher
from agent.pipeline.explaining import MissedRequests
from agent.pipeline.monitors import EngineMonitor, UnclaimedGpuMonitor
from agent.records.engine import EngineSample
from agent.records.host import HostSample
from agent.settings import EngineSettings
from agent.sources.engines.directory import EngineDirectory
from agent.sources.engines.engine_source import EngineSource, ScrapeResult
from agent.sources.engines.fetch import open_session
from agent.sources.engines.health import HealthProbe
from agent.sources.host.source import HostSource
from agent.store.minutes import MinuteStore
from agent.store.observations import ObservationStore

_LOG = logging.getLogger(__name__)

# A clock that is set a little while the agent starts.
_AHEAD_S = 60.0

# Of an engine's load, by field of the API's response.
_LOAD = {
    "running": fact.REQUESTS_RUNNING,
    "waiting": fact.REQUESTS_WAITING,
    "kv_cache_usage": fact.KV_CACHE_USAGE,
}


def engine_row(
    name: str, sample: EngineSample | None, directory: EngineDirectory
) -> Mapping[str, Any]:
    """An engine as the API shows it; without a sample it is not up, and its load is unknown."""
    load = {field: sample and sample.fact(each.name) for field, each in _LOAD.items()}
    if sample is None:
        model = directory.model_of(name)
        return {"name": name, "up": False, "model": model, "dialect": None, "read_at": None, **load}
    facts = {"model": sample.model, "dialect": sample.dialect, "read_at": sample.at}
    return {"name": name, "up": True, **facts, **load}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSources:
    """What reads one engine; `monotonic` is a clock in seconds that is never set."""

    read_engine: Callable[[float], ScrapeResult]
    read_health: Callable[[], int | None]
    read_host: Callable[[float], HostSample]
    close_host: Callable[[], None]
    monotonic: Callable[[], float]


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
        ca: Path | None = None,
        news: EngineNews | None = None,
    ) -> None:
        """`ca` is a file of authorities that engines are trusted by. `news` learns what the polls
        find."""
        self._ca = ca
        self._missed = missed
        self._news = news or EngineNews(time.time)
        self._observations = observations
        self._minutes = minutes
        self._meter = meter
        self._gpus = gpus
        self._hosts = hosts
        self._pipelines: list[EnginePipeline] = []

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
            before=before,
        )

    def _sources(self, engine: EngineSettings, before: EngineSample | None) -> EngineSources:
        session = open_session(self._ca)
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
