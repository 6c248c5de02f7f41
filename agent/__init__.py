"""Goodput, latency, cost and failures of LLM inference servers, watched from beside them."""

__version__ = "0.1.0"
