"""The agent beside a simulated engine."""

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE, Process

from agent.app import run
from agent.errors import AgentError
from agent.settings import EngineSettings, Settings

_LOG = logging.getLogger(__name__)

_STOP_GRACE_S = 5.0


class SimulatorFailed(AgentError):
    """The simulator's process ended before it listened."""


async def run_demo(settings: Settings) -> None:
    """Start a simulated vLLM in a process of its own and watch it, until stopped."""
    grpc = settings.otlp.grpc
    otlp = ("--otlp", f"http://{grpc}") if grpc is not None else ()
    simulator = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "agent.simulator", "--port", "0",
        "--service-name", "simulator", *otlp, stdout=PIPE,
    )  # fmt: skip
    try:
        url = await _announced_url(simulator)
        watched = EngineSettings(name="simulator", url=url)
        _LOG.info("SIMULATED: the figures come from a simulator at %s, not from a real engine", url)
        await run(settings.model_copy(update={"engines": (watched,)}), simulated=True)
    finally:
        await _end(simulator)


async def _announced_url(simulator: Process) -> str:
    assert simulator.stdout is not None, "the simulator's output was asked for"
    async for line in simulator.stdout:
        words = line.decode().split()
        if words[:3] == ["simulator", "listening", "on"]:
            return words[3]
    raise SimulatorFailed(f"the simulator ended with exit code {await simulator.wait()}")


async def _end(simulator: Process) -> None:
    if simulator.returncode is None:
        simulator.terminate()
        try:
            await asyncio.wait_for(simulator.wait(), _STOP_GRACE_S)
        except TimeoutError:
            simulator.kill()
            await simulator.wait()
