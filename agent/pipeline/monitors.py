"""Monitors poll the sources of engines and GPUs; samples and events are published, then stored."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from agent.analysis.engine_counts import counts_between
from agent.analysis.failures import DetectionLimits, FailureDetection, Poll
from agent.catalog.engine_facts import DATA_PARALLEL_RANKS
from agent.catalog.engine_flags import LIMIT_FLAGS
from agent.catalog.metric import Merge
from agent.catalog.reasons import NO_ANSWER, StoreWrite
from agent.errors import StoreUnavailable
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.engine_starts import StartWatch
from agent.pipeline.explaining import MissedRequests
from agent.pipeline.gpu_inventory import GpuInventory
from agent.records.engine import EngineSample, EngineStatus, HostSample
from agent.records.event import Event, EventKind
from agent.sources.engines.directory import EngineDirectory
from agent.sources.engines.engine_source import ScrapeResult
from agent.store.observations import ObservationStore


class EngineLimits:
    """Adds limits to samples: the exposition's value first, then the settings', then the flag's."""

    def __init__(self, configured: Mapping[str, int]) -> None:
        """`configured` has the limits of the settings by fact name, of one data-parallel rank."""
        self._configured = configured
        self._flags: Mapping[str, int] = {}

    def host_sample(self, sample: HostSample) -> None:
        """Keep the flags of the running engine; a stopped engine keeps its last known flags."""
        if sample.processes:
            self._flags = sample.limits

    def added_to(self, sample: EngineSample) -> EngineSample:
        """The sample with the limits that are known and not in it."""
        known = {**self._flags, **self._configured}
        ranks = sample.fact(DATA_PARALLEL_RANKS.name) or 1.0
        limits: dict[tuple[str, tuple[str, ...]], float] = {
            (limit.name, ()): known[limit.name] * (ranks if limit.merge is Merge.SUM else 1.0)
            for limit in LIMIT_FLAGS
            if limit.name in known
        }
        return replace(sample, facts={**limits, **sample.facts})


_LOG = logging.getLogger(__name__)

# Events that wait for the database. They are rare: this many come in hours without a database.
MAX_WAITING_EVENTS = 1000


class EnginePipeline:
    """Publishes samples and events of one engine, and passes them on to the causes of misses.

    Only `store` waits for the database.
    """

    def __init__(
        self, store: ObservationStore, meter: Meter, missed: MissedRequests | None = None
    ) -> None:
        self._missed = missed
        self._store = store
        self._meter = meter
        self._sample: EngineSample | None = None
        # The last one that is stored: what the engine counted since is added to the next.
        self._last: EngineSample | None = None
        self._waiting: deque[Event] = deque()
        self._lock = threading.Lock()
        self._stored_at: float | None = None

    @property
    def fill(self) -> float:
        """How full the queue of waiting events is, from 0 to 1."""
        return len(self._waiting) / MAX_WAITING_EVENTS

    @property
    def stored_at(self) -> float | None:
        """The time of the newest sample that was stored; None before the first."""
        return self._stored_at

    def sample(self, sample: EngineSample) -> None:
        """Publish a sample; the next `store` stores it."""
        self._meter.sample(sample)
        if self._missed is not None:
            self._missed.on_sample(sample)
        self._sample = sample

    def event(self, event: Event) -> None:
        """Count an event; the next `store` stores it."""
        self._meter.event(event)
        if self._missed is not None:
            self._missed.on_event(event)
        with self._lock:
            if len(self._waiting) >= MAX_WAITING_EVENTS:
                self._meter.store_failed(StoreWrite.EVENTS_DROPPED)
                return
            self._waiting.append(event)

    def store(self) -> None:
        """Store the newest sample and all waiting events.

        If the database fails, events wait for the next call and the sample is dropped.
        """
        self._store_events()
        sample, self._sample = self._sample, None
        if sample is None:
            return
        counts = None if self._last is None else counts_between(self._last, sample)
        try:
            self._store.write_engine_sample(sample, counts)
        except StoreUnavailable as error:
            _LOG.warning("a sample of engine %s is not stored: %s", sample.engine, error)
            self._meter.store_failed(StoreWrite.ENGINE_SAMPLES)
        else:
            self._last, self._stored_at = sample, sample.at

    def _store_events(self) -> None:
        with self._lock:
            while self._waiting:
                try:
                    self._store.write_event(self._waiting[0])
                except StoreUnavailable as error:
                    _LOG.warning("%d events wait for the database: %s", len(self._waiting), error)
                    self._meter.store_failed(StoreWrite.EVENTS)
                    return
                self._waiting.popleft()


class ScrapePublisher:
    """Publishes every scrape of one engine: its faults, its model, and its sample with limits."""

    def __init__(
        self,
        engine: str,
        pipeline: EnginePipeline,
        meter: Meter,
        directory: EngineDirectory,
        limits: EngineLimits,
    ) -> None:
        self._engine = engine
        self._pipeline = pipeline
        self._meter = meter
        self._directory = directory
        self._limits = limits

    def publish(self, result: ScrapeResult) -> None:
        """Publish one scrape."""
        for fault in result.faults:
            self._meter.scrape_failed(self._engine, fault)
        if result.failure is not None:
            self._meter.scrape_failed(self._engine, result.failure)
        if result.sample is not None:
            self._directory.learn_model(self._engine, result.sample.model)
            self._pipeline.sample(self._limits.added_to(result.sample))


class EngineMonitor:
    """Polls the sources of one engine and reports its events. Only one poll at a time."""

    def __init__(
        self,
        engine: str,
        *,
        read_engine: Callable[[float], ScrapeResult],
        read_health: Callable[[], int | None],
        read_host: Callable[[float], HostSample],
        gpus: GpuInventory,
        limits: DetectionLimits,
        on_scrape: Callable[[ScrapeResult], None],
        on_host: Callable[[str, HostSample], None],
        on_event: Callable[[Event], None],
        store: Callable[[], None],
        monotonic: Callable[[], float],
        starts: StartWatch,
        close_host: Callable[[], None] | None = None,
        before: EngineSample | None = None,
    ) -> None:
        """`read_health` returns the HTTP status of the health check, None without a response.

        `store` writes what the poll found and may wait for a database. `monotonic` is a clock in
        seconds that is never set. `before` is the last sample of an earlier run of the agent: a
        restart since then is reported, and an engine that is gone since then is not: it may load.
        """
        self.engine = engine
        self.before = before
        self._read_engine = read_engine
        self._read_health = read_health
        self._read_host = read_host
        self._close_host = close_host
        self._gpus = gpus
        self._detection = FailureDetection(limits, before)
        self._on_scrape = on_scrape
        self._on_host = on_host
        self._on_event = on_event
        self._store = store
        self._monotonic = monotonic
        self._starts = starts
        self._figures: Mapping[str, float] = {}
        self._unread: Mapping[str, str] = {}

    @property
    def status(self) -> EngineStatus | None:
        """The state of the engine at the last poll; None before the first."""
        return self._detection.status

    def close(self) -> None:
        """Free what the reader of the host holds."""
        if self._close_host is not None:
            self._close_host()

    def poll(self, now: float) -> None:
        """Read every source once, report the events, then store; `now` is Unix time."""
        try:
            self._report(now)
        finally:
            self._store()

    def _report(self, now: float) -> None:
        scrape = self._read_engine(now)
        self._on_scrape(scrape)
        health = None if scrape.failure in NO_ANSWER else self._read_health()
        # Last: after a failed scrape, the kernel has counted the kill that ended the engine.
        host = self._read_host(now)
        self._on_host(self.engine, host)
        self._log_unread(host.unread)
        gpus = self._gpus.take(self.engine, [process.pid for process in host.processes or ()])
        # The memory of a dead engine is free, so the evidence is the memory before its death.
        if scrape.sample is not None:
            self._figures = gpus.memory
        events = self._detection.observe(
            Poll(
                engine=self.engine,
                at=now,
                clock_s=self._monotonic(),
                sample=scrape.sample,
                failure=scrape.failure,
                health=health,
                host=host,
                xids=gpus.xids,
                gpu_problems=gpus.problems,
                recovery_actions=gpus.recovery_actions,
                gpu_figures=self._figures,
            )
        )
        restarted = any(event.kind is EventKind.RESTART for event in events)
        started = self._starts.poll(scrape.sample, now, restarted=restarted)
        for event in events if started is None else (*events, started):
            self._on_event(event)

    def _log_unread(self, unread: Mapping[str, str]) -> None:
        for part, why in unread.items():
            if self._unread.get(part) != why:
                _LOG.info("engine %s: %s cannot be read: %s", self.engine, part, why)
        self._unread = unread


class UnclaimedGpuMonitor:
    """Polls the GPUs that belong to no engine and reports their faults, without an engine."""

    def __init__(
        self,
        gpus: GpuInventory,
        *,
        on_event: Callable[[Event], None],
        store: Callable[[], None],
        monotonic: Callable[[], float],
    ) -> None:
        """`store` and `monotonic` are as for `EngineMonitor`."""
        self._gpus = gpus
        self._on_event = on_event
        self._store = store
        self._monotonic = monotonic
        self._detection = FailureDetection()

    def poll(self, now: float) -> None:
        """Report the faults that began since the last poll; `now` is Unix time."""
        gpus = self._gpus.take_unclaimed()
        poll = Poll(
            engine=None,
            at=now,
            clock_s=self._monotonic(),
            xids=gpus.xids,
            gpu_problems=gpus.problems,
            recovery_actions=gpus.recovery_actions,
        )
        for event in self._detection.observe(poll):
            self._on_event(event)
        self._store()
