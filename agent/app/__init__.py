"""The composition root: the one place that knows every concrete class."""

from agent.app.running import Agent, run

__all__ = ["Agent", "run"]
