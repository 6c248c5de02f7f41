"""A stat logger for vLLM that reports each step and each ended request to goodput-agent."""

__version__ = "0.1.0"
