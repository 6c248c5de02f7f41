"""The composition root: the one place that knows every concrete class."""

from agent.app.processes import run_processes
from agent.app.running import Agent, run

__all__ = ["Agent", "run", "run_processes"]
