"""Runs an agent until a signal or the end of its supervisor, and ends the process in time."""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from typing import Protocol

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
) -> None:
    """Run an agent until SIGTERM or SIGINT, and end the process in time after it.

    With `handover` it has a proxy in other processes, and stops with their supervisor.
    """
    give_back_large_blocks()
    await until_stopped(
        lambda: Agent(settings, simulated=simulated, now=time.time, handover=handover, gpus=gpus),
        handover,
    )


async def until_stopped(make: Callable[[], Started], handover: HandoverPlace | None = None) -> None:
    """Run what `make` builds until SIGTERM or SIGINT, and end the process in time after it."""
    stopping = asyncio.Event()
    within_s = STOP_WITHIN_S if handover is None else AGENT_STOPS_WITHIN_S

    def stop() -> None:
        if not stopping.is_set():
            stopping.set()
            end_process_within(within_s - EXIT_WITHIN_S)

    for number in (signal.SIGINT, signal.SIGTERM) if handover is None else (signal.SIGTERM,):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    orphaned = asyncio.create_task(_when_orphaned(stop, handover))
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


async def _when_orphaned(stop: Callable[[], None], handover: HandoverPlace | None) -> None:
    """Stop when the supervisor is gone, so that the next one finds all ports free."""
    if handover is not None:
        await supervisor_gone()
        stop()
