"""What the middleware uses of the agent: how the proxy measures a request.

An installed package has a copy of these modules instead, made by its build: see vendoring.py. They
need msgspec, which vLLM has, and Python 3.11.
"""

from agent.records.request import RequestRecord, Status
from agent.sources.proxy.exchange import Arrival, Ending, RawHeaders
from agent.sources.proxy.measuring.api_protocols import PROTOCOLS
from agent.sources.proxy.measuring.measured_exchange import (
    MeasuredExchange,
    MeasuringOptions,
    RequestMeasuring,
)
from agent.sources.proxy.measuring.parsed_event import TokenUsage
from agent.sources.proxy.measuring.served_request import record_bytes

__all__ = [
    "PROTOCOLS",
    "Arrival",
    "Ending",
    "MeasuredExchange",
    "MeasuringOptions",
    "RawHeaders",
    "RequestMeasuring",
    "RequestRecord",
    "Status",
    "TokenUsage",
    "record_bytes",
]
