"""One round over an engine: all that can be seen of it now, what that means, and who is told."""

from collections.abc import Callable, Mapping
from typing import Protocol

from agent.analysis.failures import Limits, Poll, Watching, classify
from agent.analysis.failures.poll import NO_CONNECTION, TIMED_OUT
from agent.pipeline.gpu_links import GpuLinks
from agent.records.engine import EngineSample
from agent.records.event import Event
from agent.records.host import HostSighting
from agent.sources.engines.source import ScrapeResult

# There is nobody who could answer another question.
_NO_ANSWER = frozenset({NO_CONNECTION, TIMED_OUT})


class PageSource(Protocol):
    """Reads an engine's page."""

    def read(self, now: float) -> ScrapeResult:
        """One sample, or the reason why there is none."""


class HostSource(Protocol):
    """Looks at an engine's machine."""

    def look(self, now: float) -> HostSighting:
        """What can be seen of the engine's processes, cgroup and log."""

    def close(self) -> None:
        """Let go of them."""


class EngineRounds:
    """Looks at one engine again and again. One round at a time."""

    def __init__(
        self,
        engine: str,
        *,
        page: PageSource,
        health: Callable[[], int | None],
        host: HostSource,
        gpus: GpuLinks,
        limits: Limits,
        on_scrape: Callable[[ScrapeResult], None],
        on_host: Callable[[str, HostSighting], None],
        on_event: Callable[[Event], None],
        store: Callable[[], None],
        monotonic: Callable[[], float],
        before: EngineSample | None = None,
    ) -> None:
        """`health` is the HTTP status of the engine's health check, None where none came.

        `store` keeps what was seen, and may wait for a database; `monotonic` is a clock in seconds
        that nobody sets; `before` is the last sample that another run of the agent kept: a restart
        since is told. An engine that went since is not, for it may be starting with the agent.
        """
        self.engine = engine
        self._page = page
        self._health = health
        self._host = host
        self._gpus = gpus
        self._limits = limits
        self._on_scrape = on_scrape
        self._on_host = on_host
        self._on_event = on_event
        self._store = store
        self._monotonic = monotonic
        self._watching = Watching(sample=before)
        self._figures: Mapping[str, float] = {}

    def poll(self, now: float) -> None:
        """Look at everything once, tell what it means, then store; `now` is Unix time."""
        try:
            self._judge(now)
        finally:
            self._store()

    def _judge(self, now: float) -> None:
        page = self._page.read(now)
        self._on_scrape(page)
        health = None if page.failure in _NO_ANSWER else self._health()
        host = self._host.look(now)
        self._on_host(self.engine, host)
        gpus = self._gpus.take(self.engine, [process.pid for process in host.processes or ()])
        # Once an engine is gone its memory is free: what counts is what it held before.
        if page.sample is not None:
            self._figures = gpus.figures
        events, self._watching = classify(
            Poll(
                engine=self.engine,
                at=now,
                clock_s=self._monotonic(),
                sample=page.sample,
                failure=page.failure,
                health=health,
                host=host,
                xids=gpus.xids,
                gpu_problems=gpus.problems,
                recovery_actions=gpus.recovery_actions,
                gpu_figures=self._figures,
            ),
            self._watching,
            self._limits,
        )
        for event in events:
            self._on_event(event)

    def close(self) -> None:
        """Let go of the engine's machine."""
        self._host.close()


class UnclaimedGpuRounds:
    """Looks at the GPUs that are no engine's: their faults are told too, without an engine."""

    def __init__(
        self,
        gpus: GpuLinks,
        *,
        on_event: Callable[[Event], None],
        store: Callable[[], None],
        monotonic: Callable[[], float],
    ) -> None:
        """`store` and `monotonic` are as those of an engine."""
        self._gpus = gpus
        self._on_event = on_event
        self._store = store
        self._monotonic = monotonic
        self._watching = Watching()

    def poll(self, now: float) -> None:
        """Tell what began since the last round; `now` is Unix time."""
        gpus = self._gpus.take_unclaimed()
        seen = Poll(
            engine=None,
            at=now,
            clock_s=self._monotonic(),
            xids=gpus.xids,
            gpu_problems=gpus.problems,
            recovery_actions=gpus.recovery_actions,
        )
        events, self._watching = classify(seen, self._watching)
        for event in events:
            self._on_event(event)
        self._store()
