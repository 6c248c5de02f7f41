"""The one way in which reading the machine fails."""

from agent.errors import AgentError


class HostUnreadable(AgentError):
    """A part of the machine cannot be seen; the message says why."""
