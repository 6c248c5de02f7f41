"""One request as it was seen from one place."""

from enum import StrEnum
from typing import NamedTuple


class Vantage(StrEnum):
    """Where a latency was taken."""

    ENGINE = "engine"
    PROXY = "proxy"
    JOINED = "joined"

    # A key on the way of every request; Enum's own hash is a call into Python.
    __hash__ = str.__hash__


class Status(StrEnum):
    """How a request ended."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    THROTTLED = "throttled"

    # A key on the way of every request; Enum's own hash is a call into Python.
    __hash__ = str.__hash__


class RequestRecord(NamedTuple):
    """What was measured of one request. Times in seconds, moments in Unix seconds, unknown None.

    A named tuple, because one is made for every request and a frozen dataclass of this width takes
    several times as long to make.

    A record is identified by `trace_id` and `span_id` (lower-case hex), never by `request_id`,
    which clients repeat. `clock_skew_s` is set where the sender's clock could not be right:
    `started_at` and `ended_at` are then estimates from the time of receipt.
    """

    trace_id: str
    span_id: str
    vantage: Vantage
    status: Status
    started_at: float
    ended_at: float
    received_at: float
    request_id: str | None = None
    agent: str | None = None
    engine: str | None = None
    model: str | None = None
    service_name: str | None = None
    tenant: str | None = None
    route: str | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    max_gap_s: float | None = None
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    finish_reason: str | None = None
    http_status: int | None = None
    clock_skew_s: float | None = None
    cause: str | None = None
    cost_usd: float | None = None
