"""The monitors: each polls the sources of one engine, or its GPUs only, and reports events."""

import logging
from collections.abc import Callable, Mapping

from agent.analysis.failures import DetectionLimits, FailureDetection, Poll
from agent.catalog.reasons import NO_ANSWER
from agent.pipeline.gpu_inventory import GpuInventory
from agent.records.engine import EngineSample
from agent.records.event import Event
from agent.records.host import HostSample
from agent.sources.engines.engine_source import ScrapeResult

_LOG = logging.getLogger(__name__)


class EngineMonitor:
    """Polls the sources of one engine and reports its events. Only one poll at a time."""

    def __init__(
        self,
        engine: str,
        *,
        read_engine: Callable[[float], ScrapeResult],
        read_health: Callable[[], int | None],
        read_host: Callable[[float], HostSample],
        close_host: Callable[[], None],
        gpus: GpuInventory,
        limits: DetectionLimits,
        on_scrape: Callable[[ScrapeResult], None],
        on_host: Callable[[str, HostSample], None],
        on_event: Callable[[Event], None],
        store: Callable[[], None],
        monotonic: Callable[[], float],
        before: EngineSample | None = None,
    ) -> None:
        """`read_health` returns the HTTP status of the health check, None without a response.

        `store` writes what the poll found and may wait for a database. `monotonic` is a clock in
        seconds that is never set. `before` is the last sample stored by an earlier run of the
        agent: a restart since then is reported. An engine that is gone since then is not
        reported, because it may be starting together with the agent.
        """
        self.engine = engine
        self.before = before
        self._read_engine = read_engine
        self._read_health = read_health
        self._read_host = read_host
        self.close = close_host
        self._gpus = gpus
        self._detection = FailureDetection(limits, before)
        self._on_scrape = on_scrape
        self._on_host = on_host
        self._on_event = on_event
        self._store = store
        self._monotonic = monotonic
        self._figures: Mapping[str, float] = {}
        self._unread: Mapping[str, str] = {}

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
        for event in events:
            self._on_event(event)

    def _log_unread(self, unread: Mapping[str, str]) -> None:
        """Log why parts of the machine cannot be read, again only when a reason changes."""
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
