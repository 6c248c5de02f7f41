"""The way of what is seen of engines: shown at once, and stored whenever the store takes it."""

import logging
import threading
from collections import deque
from typing import Protocol

from agent.catalog.reasons import StoreWrite
from agent.errors import StoreUnavailable
from agent.records.engine import EngineSample
from agent.records.event import Event

_LOG = logging.getLogger(__name__)

# Events that wait for the database; they are rare, so this many mean hours without one.
MAX_WAITING_EVENTS = 1000


class Keeper(Protocol):
    """Where samples and events are stored."""

    def keep_sample(self, sample: EngineSample) -> None:
        """Store one reading of an engine's page."""

    def keep_event(self, event: Event) -> None:
        """Store one event."""


class EngineMeter(Protocol):
    """Where what is seen of engines is shown."""

    def sample(self, sample: EngineSample) -> None:
        """An engine's page was read."""

    def event(self, event: Event) -> None:
        """Something happened."""

    def store_failed(self, what: StoreWrite) -> None:
        """The store did not take something."""


class EnginePipeline:
    """Takes what a watch sees. Only `store` waits for the database."""

    def __init__(self, keeper: Keeper, meter: EngineMeter) -> None:
        self._keeper = keeper
        self._meter = meter
        self._sample: EngineSample | None = None
        self._waiting: deque[Event] = deque()
        self._lock = threading.Lock()

    def sample(self, sample: EngineSample) -> None:
        """Show a reading, to be stored."""
        self._meter.sample(sample)
        self._sample = sample

    def event(self, event: Event) -> None:
        """Count an event, to be stored."""
        self._meter.event(event)
        with self._lock:
            if len(self._waiting) >= MAX_WAITING_EVENTS:
                self._meter.store_failed(StoreWrite.EVENTS_DROPPED)
                return
            self._waiting.append(event)

    def store(self) -> None:
        """Store what came since the last time.

        Events wait for a database that does not take them now; a reading is counted and gone.
        """
        self._store_events()
        sample, self._sample = self._sample, None
        if sample is None:
            return
        try:
            self._keeper.keep_sample(sample)
        except StoreUnavailable as error:
            _LOG.warning("a reading of engine %s is not stored: %s", sample.engine, error)
            self._meter.store_failed(StoreWrite.ENGINE_SAMPLES)

    def _store_events(self) -> None:
        with self._lock:
            while self._waiting:
                try:
                    self._keeper.keep_event(self._waiting[0])
                except StoreUnavailable as error:
                    _LOG.warning("%d events wait for the database: %s", len(self._waiting), error)
                    self._meter.store_failed(StoreWrite.EVENTS)
                    return
                self._waiting.popleft()
