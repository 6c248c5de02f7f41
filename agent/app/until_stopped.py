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
from agent.app.supervising import supervisor_gone
from agent.settings import Settings
from agent.sources.otlp.freed_memory import give_back_large_blocks
from agent.sources.proxy.handover.place import HandoverPlace

_LOG = logging.getLogger(__name__)

# SQLite's driver waits for Python's lock after each statement and each row that it reads; while a
# job computes, each wait is this long. Python's own 5 ms would add up for exports and queries.
_SWITCH_INTERVAL_S = 0.0002


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
    supervised: bool = False,
) -> None:
    """Run an agent until SIGTERM or SIGINT, and end the process in time after it.

    With `handover` it has a proxy in other processes. When it is `supervised` it stops with its
    supervisor, and where it looks for engines it also stops for others: the supervisor starts it
    again.
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
    await until_stopped(made, within_s, supervised=supervised)


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


async def until_stopped(
    make: Callable[[], Started], within_s: float = STOP_WITHIN_S, *, supervised: bool = False
) -> None:
    """Run what `make` builds until SIGTERM or SIGINT, and end the process in time after it.

    When it is `supervised` it stops with its supervisor, to which SIGINT belongs.
    """
    stopping = asyncio.Event()

    def stop() -> None:
        if not stopping.is_set():
            stopping.set()
            end_process_within(within_s - EXIT_WITHIN_S)

    for number in (signal.SIGTERM,) if supervised else (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    orphaned = asyncio.create_task(_when_orphaned(stop, supervised=supervised))
    running = make()
    try:
        await running.start()
        await stopping.wait()
        _LOG.info("stopping")
    finally:
        orphaned.cancel()
        await running.stop(within_s)
        if stopping.is_set():
            end_process_within(EXIT_WITHIN_S)


async def _when_orphaned(stop: Callable[[], None], *, supervised: bool) -> None:
    """Stop when the supervisor is gone, so that the next one finds all ports free."""
    if supervised:
        await supervisor_gone()
        stop()
