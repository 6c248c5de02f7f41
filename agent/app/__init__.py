"""The composition root: the one place that knows every concrete class."""

from agent.app.processes import run_processes
from agent.app.running import Agent
from agent.app.until_stopped import run

__all__ = ["Agent", "run", "run_processes"]
