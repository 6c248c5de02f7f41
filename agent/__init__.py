"""A sidecar that measures goodput, latency, cost and failures of LLM inference servers."""

__version__ = "0.1.0"
