"""Publishes the samples and events of engines at once, and stores them when the store can."""

import logging
import threading
from collections import deque

from agent.catalog.reasons import StoreWrite
from agent.errors import StoreUnavailable
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.engine_limits import EngineLimits
from agent.pipeline.explaining import MissedRequests
from agent.records.engine import EngineSample
from agent.records.event import Event
from agent.sources.engines.directory import EngineDirectory
from agent.sources.engines.engine_source import ScrapeResult
from agent.store.observations import ObservationStore

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
        self._waiting: deque[Event] = deque()
        self._lock = threading.Lock()
        self._stored_at: float | None = None

    @property
    def fill(self) -> float:
        """The share of the room for waiting events that is taken."""
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

        Where the database fails, events wait for the next call and the sample is dropped.
        """
        self._store_events()
        sample, self._sample = self._sample, None
        if sample is None:
            return
        try:
            self._store.write_engine_sample(sample)
        except StoreUnavailable as error:
            _LOG.warning("a sample of engine %s is not stored: %s", sample.engine, error)
            self._meter.store_failed(StoreWrite.ENGINE_SAMPLES)
        else:
            self._stored_at = sample.at

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
