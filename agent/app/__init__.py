"""The composition root: the one place that knows every concrete class."""

from agent.app.running import Agent, open_migrated, run

__all__ = ["Agent", "open_migrated", "run"]
