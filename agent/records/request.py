"""One request as it was seen from one place."""

from collections.abc import Mapping
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


class ProxyView(NamedTuple):
    """What only the proxy sees of a request. Times in seconds from arrival, unknown None.

    `first_visible_s` is the time to the first token that is no reasoning. `gaps` counts the times
    between chunks that held tokens by bin of `analysis.quantiles`; `gap_tokens` is the most tokens
    that a chunk held after the first, None where the engine did not tell: only with 1 is a gap an
    inter-token latency. Bytes are those of the bodies. `error` is a short word for what went wrong.
    The limits are those that the client asked for with this request.
    """

    first_byte_s: float | None = None
    first_visible_s: float | None = None
    gaps: Mapping[int, int] | None = None
    gap_tokens: int | None = None
    input_bytes: int | None = None
    output_bytes: int | None = None
    error: str | None = None
    choices: int | None = None
    streamed: bool | None = None
    ttft_limit_s: float | None = None
    tpot_limit_s: float | None = None


class EngineView(NamedTuple):
    """What the engine told of a request that the proxy saw too, where the proxy's word counts.

    Latencies in seconds from the arrival at the engine, unknown None. `holdback_s` is the time from
    the engine's first token to the user's: what lay before the engine and behind it, the network
    included.
    """

    request_id: str | None = None
    status: Status | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    holdback_s: float | None = None


class RequestRecord(NamedTuple):
    """What was measured of one request. Times in seconds, moments in Unix seconds, unknown None.

    A named tuple, because one is made for every request and a frozen dataclass of this width takes
    several times as long to make.

    A record is identified by `trace_id` and `span_id` (lower-case hex), never by `request_id`,
    which clients repeat. `clock_skew_s` is set where the sender's clock could not be right:
    `started_at` and `ended_at` are then estimates from the time of receipt. `proxied` is None for
    what the proxy did not see. The engine's span is the child of the proxy's: of a joined record
    `span_id` is the engine's, and `proxy_span_id` the proxy's, which is None for all others.
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
    proxied: ProxyView | None = None
    parent_span_id: str | None = None
    proxy_span_id: str | None = None
    engine_view: EngineView | None = None
