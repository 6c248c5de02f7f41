"""Starts and stops an agent, and runs it until a signal or the end of its supervisor."""

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Protocol

import agent
from agent.app.discovery import EngineDiscovery, discovery_of
from agent.app.engine_setup import REFRESH_EVERY_S
from agent.app.engines import (
    GpuSource,
)
from agent.app.listeners import API
from agent.app.parts import AgentParts, build_parts
from agent.app.supervising import (
    AGENT_STOPS_WITHIN_S,
    EXIT_WITHIN_S,
    SIGNALS,
    STOP_WITHIN_S,
    STOPS_LAST,
    Trial,
    end_process_within,
    start_again,
    supervisor_gone,
    within,
)
from agent.errors import AgentError
from agent.outputs.api.api_context import ApiContext
from agent.outputs.api.routes import LiveFigures, live_figures, make_api
from agent.outputs.web.documents import documents
from agent.settings import Settings
from agent.sources.proxy.handover.messages import HandoverAddress

_LOG = logging.getLogger(__name__)

# Of the time to stop: an open call gets half of it, its server a little more, closing a second.
_GRACE_SHARE = 0.5
_LISTENERS_SHARE = 0.55
_CLOSING_S = 1.0
SETTLE_EVERY_S = 1.0
UNCLAIMED_EVERY_S = 5.0
EXPLAIN_EVERY_S = 1.0
# Rates need two polls, and whoever has just started an agent looks at its page.
_SECOND_POLL_IN_S = 1.0

# Batches of requests are hundreds of small objects that live for milliseconds. The collector's
# default of 700 allocations would walk them many times. A search stops all threads, a millisecond
# for each 1,000 objects, so a first begins after 2,000; a third, of all objects, is rare.
GC_THRESHOLDS = 2_000, 3, 50
# SQLite's driver waits for Python's lock after each statement and each row that it reads; while a
# job computes, each wait is this long. Python's own 5 ms would add up for exports and queries.
_SWITCH_INTERVAL_S = 0.0002
_TRIAL_CHECK_S = 0.1


class Agent:
    """Starts and stops the parts of one agent."""

    def __init__(self, parts: AgentParts) -> None:
        self._base, self._listeners, self._jobs = parts.base, parts.listeners, parts.jobs
        self._engines, self._requests, self._outputs = parts.engines, parts.requests, parts.outputs
        self._live: LiveFigures | None = None

    async def start(self) -> None:
        """Poll every engine once, then listen on all ports.

        Raises SettingsInvalid for a taken port.
        """
        now = self._base.now
        await asyncio.to_thread(self._engines.gpus.read_first, now())
        polls = [asyncio.to_thread(each.poll, now()) for each in self._engines.monitors]
        await asyncio.gather(*polls)
        self._requests.plugins.start()
        await self._listeners.receive(self._requests.receiver)
        if self._requests.proxying is not None:
            await self._requests.proxying.start()
        listen = self._base.settings.listen
        context = self._api_context()
        self._live = live_figures(context)
        self._listeners.serve(API, make_api(context, self._live), listen.host, listen.port)
        self._schedule()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)

    def _api_context(self) -> ApiContext:
        storage = self._base.settings.storage
        return ApiContext(
            read=self._base.store.read,
            now=self._base.now,
            longest_window_s=storage.keep_rollups,
            rows_kept_s=storage.keep_requests,
            query_limit_s=storage.query_timeout,
            metrics=self._outputs.exposition.render,
            engines=self._base.engine_rows.read,
            gpus=self._engines.gpus.rows,
            setups=self._outputs.setups.rows,
            states=self._engines.states,
            problems=self._outputs.readiness.problems,
            parts=self._outputs.readiness.parts,
            access=self._listeners.access,
            documents=documents(),
            tenant_budgets=self._base.settings.tenant_budgets,
            version=agent.__version__,
            simulated=self._base.simulated,
            trace_url=self._base.settings.trace_url,
        )

    def _schedule(self) -> None:
        pairs = zip(self._base.settings.engines, self._engines.monitors, strict=True)
        for settings, monitor in pairs:
            self._jobs.every(
                settings.scrape_interval,
                f"poll {monitor.engine}",
                monitor.poll,
                first_in_s=min(_SECOND_POLL_IN_S, settings.scrape_interval),
            )
        self._engines.gpus.schedule(self._jobs)
        for router, source in zip(self._base.settings.routers, self._engines.routers, strict=True):
            job = f"read router {router.name}"
            self._jobs.every(router.scrape_interval, job, source.poll, first_in_s=0.0)
        self._engines.efficiency.schedule(self._jobs)
        self._requests.plugins.schedule(self._jobs)
        if self._requests.proxying is not None:
            self._requests.proxying.schedule(self._jobs)
        self._jobs.every(UNCLAIMED_EVERY_S, "poll GPUs of no engine", self._engines.unclaimed.poll)
        self._jobs.every(SETTLE_EVERY_S, "settle requests", self._requests.pipeline.settle)
        self._jobs.every(EXPLAIN_EVERY_S, "explain missed requests", self._engines.missed.run)
        self._jobs.every(SETTLE_EVERY_S, "rows of ended requests", self._requests.ended_rows.store)
        self._base.store.schedule(self._jobs)
        if self._outputs.pushing is not None:
            self._outputs.pushing.schedule(self._jobs)
        setups = self._outputs.setups
        self._jobs.every(REFRESH_EVERY_S, "setup of engines", setups.refresh, first_in_s=0.0)
        self._outputs.own_health.of_jobs(self._jobs)
        self._jobs.start()

    async def stop(self, within_s: float = STOP_WITHIN_S) -> None:
        """Take no more requests, finish the accepted ones, and close everything.

        It takes at most `within_s`. What hangs is left.
        """
        deadline = time.monotonic() + within_s - 2 * EXIT_WITHIN_S
        grace_s = _GRACE_SHARE * within_s
        self._requests.receiver.stop()
        if self._live is not None:
            self._live.stop()
        await asyncio.to_thread(self._requests.plugins.close)
        # Jobs may wait for the database, and the listeners do not wait for jobs.
        jobs = asyncio.create_task(self._jobs.stop())
        await within(_LISTENERS_SHARE * within_s, "open calls", self._listeners.stop(grace_s))
        await self._store_accepted(deadline - _CLOSING_S)
        left_s = max(deadline - time.monotonic(), 0.0)
        closing = [self._close_sources(jobs), asyncio.to_thread(self._base.store.close)]
        if self._requests.forwarder is not None:
            closing.append(asyncio.to_thread(self._requests.forwarder.close, min(left_s, grace_s)))
        if self._outputs.pushing is not None:
            last = self._outputs.pushing.close
            closing.append(asyncio.to_thread(last, self._base.now(), min(left_s, grace_s)))
        await within(left_s, "the closing of sources and store", *closing)

    async def _store_accepted(self, deadline: float) -> None:
        works = [self._requests.receiver.close()]
        if self._requests.proxying is not None:
            works.append(self._requests.proxying.close())
        await within(deadline - time.monotonic(), "the writing of requests", *works)
        last = asyncio.to_thread(self._requests.ended_rows.store_last, self._base.now())
        await within(deadline - time.monotonic(), "the writing of ended requests", last)
        left_s = max(deadline - time.monotonic(), 0.0)
        await asyncio.to_thread(self._requests.writer.close, left_s)

    async def _close_sources(self, jobs: "asyncio.Task[None]") -> None:
        await jobs
        await asyncio.to_thread(self._engines.gpus.close)
        for monitor in self._engines.monitors:
            monitor.close()
        for router in self._engines.routers:
            router.close()


class Started(Protocol):
    """What runs until it is stopped."""

    async def start(self) -> None:
        """Begin."""

    async def stop(self, within_s: float) -> None:
        """End in at most this time."""


async def run(
    settings: Settings,
    *,
    simulated: bool = False,
    handover: HandoverAddress | None = None,
    gpus: GpuSource | None = None,
    begin_trial: Callable[[], Trial] | None = None,
) -> None:
    """Run an agent as `until_stopped` runs it, with `handover` beside a proxy in other processes.

    If it looks for engines, it also stops for others: its supervisor starts it again.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    discovery = discovery_of(settings)
    if discovery is not None:
        await asyncio.to_thread(discovery.read_first)
        settings = discovery.settings()

    def made() -> Started:
        parts = build_parts(
            settings, simulated=simulated, now=time.time, handover=handover, gpus=gpus
        )
        return Agent(parts) if discovery is None else _Discovering(parts, discovery)

    if handover is None:
        await until_stopped(made, STOP_WITHIN_S, begin_trial)
    else:
        await until_stopped(made, AGENT_STOPS_WITHIN_S, begin_trial, STOPS_LAST)


class _Discovering:
    """An agent that stops, as by a signal, when other engines must be watched."""

    def __init__(self, parts: AgentParts, discovery: EngineDiscovery) -> None:
        self._agent = Agent(parts)
        self._discovery = discovery
        parts.outputs.readiness.add("discovery", discovery.status_text)
        discovery.publish(parts.base.meter)

    async def start(self) -> None:
        """Start the agent, then follow the changes since its engines were found."""
        await self._agent.start()
        self._discovery.start(_stop_for_others)

    async def stop(self, within_s: float) -> None:
        self._discovery.stop()
        await self._agent.stop(within_s)


def _stop_for_others() -> None:
    _LOG.info("other engines must be watched now")
    os.kill(os.getpid(), signal.SIGTERM)


class _Stop:
    """The stop of this process by a signal or with its supervisor, and what follows it."""

    def __init__(
        self, within_s: float, begin_trial: Callable[[], Trial] | None, number: signal.Signals
    ) -> None:
        self._within_s = within_s
        self._number = number
        self._begin_trial = begin_trial
        self._task: asyncio.Task[None] | None = None
        # Whether the process becomes a new agent when it has stopped.
        self.goes_on = False
        self.asked = asyncio.Event()

    def listen(self) -> None:
        """Heed signals and the supervisor from now on."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(self._number, self._end)
        if self._begin_trial is None:
            self._task = asyncio.create_task(self._end_with_supervisor())
            return
        loop.add_signal_handler(signal.SIGINT, self._end)
        loop.add_signal_handler(signal.SIGHUP, self._reload, self._begin_trial)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})

    def ignore(self) -> None:
        """End what was begun: the process stops."""
        if self._task is not None:
            self._task.cancel()

    def last(self) -> None:
        """End the process, or make it the new agent."""
        if self.goes_on:
            # A signal that comes now waits for the new agent, which gets none of these files.
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            start_again()
        os._exit(0)

    async def _end_with_supervisor(self) -> None:
        # So that the next one finds all ports free.
        await supervisor_gone()
        self._end()

    def _end(self) -> None:
        self.goes_on = False
        self.ignore()
        self._stop()

    def _stop(self) -> None:
        if not self.asked.is_set():
            self.asked.set()
            end_process_within(self._within_s - EXIT_WITHIN_S, self.last)

    def _reload(self, begin_trial: Callable[[], Trial]) -> None:
        """Try a new agent, in place of one that is tried already: files may have changed since."""
        self.ignore()
        self._task = asyncio.create_task(self._try(begin_trial))

    async def _try(self, begin_trial: Callable[[], Trial]) -> None:
        try:
            trial = begin_trial()
        except (AgentError, OSError) as error:
            _LOG.error("no new agent can be tried, so nothing changes: %s", error)
            return
        try:
            while not trial.has_ended():
                await asyncio.sleep(_TRIAL_CHECK_S)
            if trial.plan() is not None and not self.asked.is_set():
                _LOG.info("starting anew")
                self.goes_on = True
                self._stop()
        finally:
            trial.kill()


async def until_stopped(
    make: Callable[[], Started],
    within_s: float = STOP_WITHIN_S,
    begin_trial: Callable[[], Trial] | None = None,
    number: signal.Signals = signal.SIGTERM,
) -> None:
    """Run what `make` builds until the signal or SIGINT, and end the process in time after it.

    With `begin_trial`, SIGHUP tries a new agent: if it can start, this process stops and becomes
    it. Without, the process stops with its supervisor, to which SIGINT and SIGHUP belong.
    """
    stop = _Stop(within_s, begin_trial, number)
    stop.listen()
    running = make()
    try:
        await running.start()
        await stop.asked.wait()
        _LOG.info("stopping")
    finally:
        stop.ignore()
        await running.stop(within_s)
        if stop.goes_on:
            stop.last()
        if stop.asked.is_set():
            end_process_within(EXIT_WITHIN_S)
