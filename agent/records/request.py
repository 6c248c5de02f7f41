"""The record of one request, as the engine, the proxy, or both saw it."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, NamedTuple

from agent.records.record_fields import Join, Length, Mark, UtcSeconds


class Vantage(StrEnum):
    """Who saw a request, and so where its latencies were taken."""

    ENGINE = "engine"
    PROXY = "proxy"
    JOINED = "joined"

    # A key in the work for every request; Enum's own hash is a call into Python.
    __hash__ = str.__hash__


class Status(StrEnum):
    """How a request ended. `invalid` is the client's own mistake, such as a model's wrong name."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    THROTTLED = "throttled"
    INVALID = "invalid"

    # A key in the work for every request; Enum's own hash is a call into Python.
    __hash__ = str.__hash__


# Failures of the service.
FAILED = frozenset((Status.ERROR, Status.TIMEOUT, Status.THROTTLED))

# Ends that the client decided: no failure, and no part of an error ratio.
BY_CLIENT = frozenset((Status.CANCELLED, Status.INVALID))

_Name = Annotated[str | None, Length(256)]
# An engine makes it of a prefix and the client's id.
_ResponseId = Annotated[str | None, Length(320)]
_ShortName = Annotated[str | None, Length(100)]
_Word = Annotated[str | None, Length(64)]
_OwnLatency = Annotated[float | None, Join.PROXY]
_EnginePhase = Annotated[float | None, Join.ENGINE_FIRST]
_Tokens = Annotated[int | None, Mark.PER_CHOICE]
_Preemptions = Annotated[int | None, Mark.SMALL, Mark.PER_CHOICE, Join.ENGINE_FIRST]


class ProxyView(NamedTuple):
    """What only the proxy sees of a request. Times in seconds from arrival, unknown None.

    `first_visible_s` is the time to the first token that is no reasoning. `gaps` counts the times
    between token chunks by bin of `analysis.quantiles`. `gap_tokens` is the most tokens of a chunk
    after the first, None where the engine does not send it: only with 1 is a gap an inter-token
    latency. `requested_model` and `requested_tenant` are what the client wrote where the record has
    another model or tenant instead. Bytes are those of the bodies. `error` is a short word for what
    went wrong. The limits are those of the client, sent with the request. `response_id` is the id
    in the response's body. `reasoning_s` is the time from the first reasoning token to the first
    one that is none. `media_bytes` are those of the media that the request itself holds.
    `priority` is vLLM's. `end_user`, `workload` and `session` are those of trusted headers.
    """

    first_byte_s: float | None = None
    first_visible_s: float | None = None
    gaps: Mapping[int, int] | None = None
    gap_tokens: int | None = None
    input_bytes: int | None = None
    output_bytes: int | None = None
    error: _Word = None
    choices: int | None = None
    streamed: bool | None = None
    ttft_limit_s: float | None = None
    tpot_limit_s: float | None = None
    requested_model: _Name = None
    requested_tenant: _Name = None
    response_id: _ResponseId = None
    reasoning_s: float | None = None
    media_parts: int | None = None
    media_bytes: int | None = None
    priority: Annotated[int | None, Mark.SMALL] = None
    end_user: _Name = None
    workload: _Name = None
    session: _Name = None


class EngineView(NamedTuple):
    """The engine's values of a joined request where the record holds the proxy's.

    Latencies in seconds from the arrival at the engine, unknown None. `holdback_s` is the time from
    the engine's first token to the user's: before and behind the engine, the network included.

    A span gives all of them. Until it comes, a record of the proxy has those in the response's own
    `metrics`, if there are any: latencies from when the engine queued the request.
    """

    request_id: _Name = None
    status: Status | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    holdback_s: Annotated[float | None, Join.COMPUTED] = None


class RequestRecord(NamedTuple):
    """One request. Times in seconds, timestamps in Unix seconds, unknown None.

    Each field is declared here alone, with its column and its join (see `records.record_fields`); a
    field without marks is joined as the proxy's value or, where that is unknown, the engine's. A
    new field also needs a migration.

    A named tuple, because one is made for every request and a frozen dataclass of this width takes
    several times as long to make.

    A record is identified by `trace_id` and `span_id` (lower-case hex), never by `request_id`,
    which clients repeat. `clock_skew_s` is set where the sender's clock is wrong: `started_at` and
    `ended_at` are then estimates from the time of receipt. `proxied` is None without the proxy's
    view. The engine's span is the child of the proxy's: a joined record has the engine's `span_id`
    and the proxy's `proxy_span_id`, which is None for all others.
    """

    trace_id: Annotated[str, Length(32)]
    span_id: Annotated[str, Length(16), Join.ENGINE]
    vantage: Annotated[Vantage, Join.COMPUTED]
    status: Annotated[Status, Join.PROXY]
    started_at: Annotated[UtcSeconds, Join.PROXY]
    ended_at: Annotated[UtcSeconds, Join.PROXY]
    received_at: Annotated[UtcSeconds, Join.COMPUTED]
    request_id: _Name = None
    agent: _ShortName = None
    engine: _ShortName = None
    model: _Name = None
    service_name: _Name = None
    tenant: _Name = None
    route: _Name = None
    ttft_s: _OwnLatency = None
    tpot_s: _OwnLatency = None
    e2e_s: _OwnLatency = None
    queue_s: _EnginePhase = None
    prefill_s: _EnginePhase = None
    decode_s: _EnginePhase = None
    max_gap_s: _OwnLatency = None
    input_tokens: _Tokens = None
    cached_tokens: Annotated[_Tokens, Join.ENGINE_FIRST] = None
    output_tokens: _Tokens = None
    reasoning_tokens: _Tokens = None
    finish_reason: _Word = None
    http_status: Annotated[int | None, Mark.SMALL] = None
    clock_skew_s: Annotated[float | None, Join.PROXY] = None
    cause: Annotated[_Word, Join.COMPUTED] = None
    cost_usd: float | None = None
    proxied: Annotated[ProxyView | None, Join.PROXY] = None
    parent_span_id: Annotated[str | None, Length(16), Join.ENGINE] = None
    proxy_span_id: Annotated[str | None, Length(16), Join.COMPUTED] = None
    engine_view: Annotated[EngineView | None, Join.COMPUTED] = None
    preemptions: _Preemptions = None
