"""A stat logger for vLLM that tells goodput-agent of each step and of each request that ended."""

__version__ = "0.1.0"
