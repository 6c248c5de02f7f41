"""The error of the host source."""

from agent.errors import AgentError


class HostUnreadable(AgentError):
    """A part of the machine cannot be read; the message has the reason."""
