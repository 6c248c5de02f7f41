"""Runs a whole simulator on a free port during a test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from agent.simulator.openai_server import run_simulator
from agent.simulator.scenario import Scenario
from agent.simulator.span_sender import SpanTarget

# Fifty times as fast as the default: a token every 0.2 ms.
QUICK = Scenario(time_scale=50.0)


@asynccontextmanager
async def running(
    scenario: Scenario = QUICK, *, traffic: bool = False, spans: SpanTarget | None = None
) -> AsyncIterator[str]:
    """The URL of a simulator; on exit it is stopped and its spans are flushed."""
    listening = asyncio.get_running_loop().create_future()
    simulator = asyncio.create_task(
        run_simulator(scenario, announce=listening.set_result, port=0, traffic=traffic, spans=spans)
    )
    await asyncio.wait({simulator, listening}, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield simulator.result() or "" if simulator.done() else listening.result()
    finally:
        simulator.cancel()
        with suppress(asyncio.CancelledError):
            await simulator
