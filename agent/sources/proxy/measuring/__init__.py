"""Measures proxied requests while their answers pass."""

from agent.sources.proxy.measuring.exchange import MeasuredExchange
from agent.sources.proxy.measuring.measuring import MeasuringOptions, RequestMeasuring

__all__ = ["MeasuredExchange", "MeasuringOptions", "RequestMeasuring"]
