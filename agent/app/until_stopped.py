"""Runs an agent until a signal or the end of its supervisor, and ends the process in time."""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Protocol

from agent.app.discovery import EngineDiscovery, discovery_of
from agent.app.gpu_jobs import GpuSource
from agent.app.running import Agent
from agent.app.stopping import (
    AGENT_STOPS_WITHIN_S,
    EXIT_WITHIN_S,
    STOP_WITHIN_S,
    end_process_within,
)
from agent.app.supervising import SIGNALS, Trial, start_again, supervisor_gone
from agent.errors import AgentError
from agent.settings import Settings
from agent.sources.otlp.freed_memory import give_back_large_blocks
from agent.sources.proxy.handover.place import HandoverPlace

_LOG = logging.getLogger(__name__)

# SQLite's driver waits for Python's lock after each statement and each row that it reads; while a
# job computes, each wait is this long. Python's own 5 ms would add up for exports and queries.
_SWITCH_INTERVAL_S = 0.0002
_TRIAL_CHECK_S = 0.1


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
    handover: HandoverPlace | None = None,
    gpus: GpuSource | None = None,
    begin_trial: Callable[[], Trial] | None = None,
) -> None:
    """Run an agent as `until_stopped` runs it, with `handover` beside a proxy in other processes.

    Where it looks for engines, it also stops for others: its supervisor starts it again.
    """
    give_back_large_blocks()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    discovery = discovery_of(settings)
    if discovery is not None:
        await asyncio.to_thread(discovery.read_first)
        settings = discovery.settings()

    def made() -> Started:
        now = time.time
        agent = Agent(settings, simulated=simulated, now=now, handover=handover, gpus=gpus)
        return agent if discovery is None else _Discovering(agent, discovery)

    within_s = STOP_WITHIN_S if handover is None else AGENT_STOPS_WITHIN_S
    await until_stopped(made, within_s, begin_trial)


class _Discovering:
    """An agent that stops, as by a signal, when other engines must be watched."""

    def __init__(self, agent: Agent, discovery: EngineDiscovery) -> None:
        self._agent = agent
        self._discovery = discovery
        agent.tells("discovery", discovery.in_words)
        agent.publishes(discovery.publish)

    async def start(self) -> None:
        """Start the agent, then follow the changes since its engines were found."""
        await self._agent.start()
        self._discovery.start(_stop_for_others)

    async def stop(self, within_s: float) -> None:
        """Stop both."""
        self._discovery.stop()
        await self._agent.stop(within_s)


def _stop_for_others() -> None:
    _LOG.info("other engines must be watched now")
    os.kill(os.getpid(), signal.SIGTERM)


class _Stop:
    """The stop of this process by a signal or with its supervisor, and what follows it."""

    def __init__(self, within_s: float, begin_trial: Callable[[], Trial] | None) -> None:
        self._within_s = within_s
        self._begin_trial = begin_trial
        self._task: asyncio.Task[None] | None = None
        # Whether the process becomes a new agent when it has stopped.
        self.goes_on = False
        self.asked = asyncio.Event()

    def listen(self) -> None:
        """Heed signals and the supervisor from now on."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._end)
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
) -> None:
    """Run what `make` builds until SIGTERM or SIGINT, and end the process in time after it.

    With `begin_trial`, SIGHUP tries a new agent: if it can start, this process stops and becomes
    it. Without, the process stops with its supervisor, to which SIGINT and SIGHUP belong.
    """
    stop = _Stop(within_s, begin_trial)
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
