"""The record of one request: the user's view, the engine's, or both.

The user's view is measured by the proxy, or by vLLM's plugin in the engine's front.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, NamedTuple

from agent.records.record_fields import Join, Length, Mark, UtcSeconds


class Vantage(StrEnum):
    """Who saw a request, and so where its latencies were taken."""

    ENGINE = "engine"
    PROXY = "proxy"
    JOINED = "joined"
    ROUTER = "router"

    # Every request looks it up in dictionaries, and Enum's own hash is a slow call.
    __hash__ = str.__hash__


# Requests with the engine's view, and those with the user's.
ENGINE_VIEWS = frozenset({Vantage.ENGINE, Vantage.JOINED})
PROXY_VIEWS = frozenset({Vantage.PROXY, Vantage.JOINED})


class Status(StrEnum):
    """How a request ended. `invalid` is the client's own mistake, such as a model's wrong name."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    THROTTLED = "throttled"
    INVALID = "invalid"

    # Every request looks it up in dictionaries, and Enum's own hash is a slow call.
    __hash__ = str.__hash__


# Failures of the service.
FAILED = frozenset((Status.ERROR, Status.TIMEOUT, Status.THROTTLED))

# Ends that the client decided: no failure, and no part of an error ratio.
BY_CLIENT = frozenset((Status.CANCELLED, Status.INVALID))

_THROTTLED = frozenset((429, 503))
# 408 and 499 say that a request was not read or not answered in time.
_NOT_THE_CLIENTS = frozenset((408, 429, 499))


def status_of(http_status: int) -> Status:
    """The status of a response other than 2xx; most of 4xx are the client's own mistakes."""
    if http_status in _THROTTLED:
        return Status.THROTTLED
    if 400 <= http_status < 500 and http_status not in _NOT_THE_CLIENTS:
        return Status.INVALID
    return Status.ERROR


_Name = Annotated[str | None, Length(256)]
# An engine makes it of a prefix and the client's id.
_ResponseId = Annotated[str | None, Length(320)]
_ShortName = Annotated[str | None, Length(100)]
_Word = Annotated[str | None, Length(64)]
_OwnLatency = Annotated[float | None, Join.PROXY]
_EnginePhase = Annotated[float | None, Join.ENGINE_FIRST]
_OfEngine = Annotated[float | None, Join.ENGINE]
_Tokens = Annotated[int | None, Mark.PER_CHOICE]
_Preemptions = Annotated[int | None, Mark.SMALL, Mark.PER_CHOICE, Join.ENGINE_FIRST]


class ProxyView(NamedTuple):
    """What only the user's view has of a request. Times in seconds from arrival, unknown None."""

    first_byte_s: float | None = None
    """Arrival to the first byte of the response's body."""
    first_visible_s: float | None = None
    """Arrival to the first token that is not reasoning."""
    gaps: Mapping[int, int] | None = None
    """Times between token chunks, counted by bin of `analysis.quantiles`."""
    gap_tokens: int | None = None
    """Most tokens of a chunk after the first; only with 1 is a gap an inter-token latency."""
    input_bytes: int | None = None
    """Bytes of the request's body."""
    output_bytes: int | None = None
    """Bytes of the response's body."""
    error: _Word = None
    """A short word for what went wrong."""
    choices: int | None = None
    """Responses that the client asked for in one request (`n`)."""
    streamed: bool | None = None
    """Whether the response was a stream."""
    ttft_limit_s: float | None = None
    """The client's own limit on TTFT, sent with the request."""
    tpot_limit_s: float | None = None
    """The client's own limit on TPOT, sent with the request."""
    requested_model: _Name = None
    """The model that the client wrote, if `model` is another one."""
    requested_tenant: _Name = None
    """The tenant that the client wrote, if `tenant` is another one."""
    response_id: _ResponseId = None
    """The id in the response's body."""
    reasoning_s: float | None = None
    """The first reasoning token to the first other token."""
    media_parts: int | None = None
    """Images, sounds and videos of the request."""
    media_bytes: int | None = None
    """Bytes of the media that the request itself holds."""
    priority: Annotated[int | None, Mark.SMALL] = None
    """vLLM's priority of the request."""
    end_user: _Name = None
    """The user, by the header `proxy.user_header`; of the plugin: by its variable."""
    workload: _Name = None
    """The workload, by the header `proxy.workload_header`; of the plugin: by its variable."""
    session: _Name = None
    """The session, by the header `proxy.session_header`; of the plugin: by its variable. Without
    one, `prompt_cache_key` of the body, or a digest of vLLM's `cache_salt`."""


class EngineView(NamedTuple):
    """The engine's values of a joined request if the record holds the proxy's.

    Latencies in seconds from the arrival at the engine, unknown None.

    A span gives all of them. Until it comes, a record of the proxy has those in the response's own
    `metrics`, if there are any: latencies from when the engine queued the request.
    """

    request_id: _Name = None
    """The engine's id of a request of which `request_id` is the proxy's."""
    status: Status | None = None
    """How the request ended at the engine."""
    ttft_s: float | None = None
    """TTFT by the engine, from the arrival there."""
    tpot_s: float | None = None
    """TPOT by the engine."""
    e2e_s: float | None = None
    """Arrival at the engine to its last token."""
    holdback_s: Annotated[float | None, Join.COMPUTED] = None
    """The engine's first token to the user's: the way to and from the engine."""


class RequestRecord(NamedTuple):
    """One request. Times in seconds, timestamps in Unix seconds, unknown None.

    Each field is declared here alone, with its column and its join (see `records.record_fields`),
    and below it its line in docs/reference/tables.md. A field without marks is joined as the
    proxy's value or, if that is unknown, the engine's. A new field also needs a migration.

    A named tuple, because one is made for every request and a frozen dataclass of this width takes
    several times as long to make.

    A record is identified by `trace_id` and `span_id` (lower-case hex), never by `request_id`,
    which clients repeat. `clock_skew_s` is set if the sender's clock is wrong: `started_at` and
    `ended_at` are then estimates from the time of receipt. `proxied` is None without the proxy's
    view. The engine's span is the child of the proxy's: a joined record has the engine's `span_id`
    and the proxy's `proxy_span_id`, which is None for all others.
    """

    trace_id: Annotated[str, Length(32)]
    """Trace id, in lower-case hex."""
    span_id: Annotated[str, Length(16), Join.ENGINE]
    """Span id, in lower-case hex; the engine's if an engine's span is known."""
    vantage: Annotated[Vantage, Join.COMPUTED]
    """Whose view: engine; proxy (the user's, by the proxy or vLLM's plugin); joined (both); router
    (a router's, of a request that failed there)."""
    status: Annotated[Status, Join.PROXY]
    """How the request ended: ok, error, timeout, cancelled, throttled or invalid."""
    started_at: Annotated[UtcSeconds, Join.PROXY]
    """When the request arrived."""
    ended_at: Annotated[UtcSeconds, Join.PROXY]
    """When the request ended."""
    received_at: Annotated[UtcSeconds, Join.COMPUTED]
    """When the agent got the request's span or record."""
    request_id: _Name = None
    """The client's id of the request. Clients repeat it."""
    agent: _ShortName = None
    """The agent that stored the row."""
    engine: _ShortName = None
    """The engine, by its name in the settings."""
    model: _Name = None
    """The model that served the request."""
    service_name: _Name = None
    """`service.name` of the engine's span."""
    tenant: _Name = None
    """Whom the request was for, by its headers."""
    route: _Name = None
    """The path of the request."""
    ttft_s: _OwnLatency = None
    """Arrival to the first token."""
    tpot_s: _OwnLatency = None
    """First to last token, over the output tokens after the first."""
    e2e_s: _OwnLatency = None
    """Arrival to the last token."""
    queue_s: _EnginePhase = None
    """Wait in the engine before the request was first scheduled."""
    prefill_s: _EnginePhase = None
    """First scheduling to the first token."""
    decode_s: _EnginePhase = None
    """First to last token, by the engine."""
    max_gap_s: _OwnLatency = None
    """Longest time between two token chunks, as the user got them."""
    input_tokens: _Tokens = None
    """Tokens of the prompt, cached ones included."""
    cached_tokens: Annotated[_Tokens, Join.ENGINE_FIRST] = None
    """Tokens of the prompt that a cache served."""
    output_tokens: _Tokens = None
    """Tokens of the response, reasoning included."""
    reasoning_tokens: _Tokens = None
    """Tokens of the response that are reasoning."""
    finish_reason: _Word = None
    """Why generation ended, in the engine's word."""
    http_status: Annotated[int | None, Mark.SMALL] = None
    """HTTP status of the response."""
    clock_skew_s: Annotated[float | None, Join.PROXY] = None
    """How wrong the sender's clock is; `started_at` and `ended_at` are then estimates."""
    cause: Annotated[_Word, Join.COMPUTED] = None
    """The first cause of a missed request."""
    cost_usd: float | None = None
    """The request's share of the cost of its engine."""
    proxied: Annotated[ProxyView | None, Join.PROXY] = None
    parent_span_id: Annotated[str | None, Length(16), Join.ENGINE] = None
    """Span id of the engine's span's parent."""
    proxy_span_id: Annotated[str | None, Length(16), Join.COMPUTED] = None
    """Span id of the proxy in a joined row."""
    engine_view: Annotated[EngineView | None, Join.COMPUTED] = None
    preemptions: _Preemptions = None
    """Times that the request lost its place in the batch."""
    hop: Annotated[bool | None, Join.ENGINE] = None
    """True of the prefill for a request that another engine decodes; no figure counts the row."""
    prefill_engine: Annotated[str | None, Length(100), Join.ENGINE] = None
    """The engine that computed the prompt for `engine`."""
    prefill_hop_s: _OfEngine = None
    """Arrival at that engine to its end there."""
    prefill_queue_s: _OfEngine = None
    """Wait in that engine before the request was first scheduled."""
    prefill_gap_s: _OfEngine = None
    """End at that engine to arrival at `engine`, by their clocks; negative if both ran at once."""
    router_wait_s: _OfEngine = None
    """Arrival at the router to arrival at `engine`, by their clocks; a prefill is in it."""

    @property
    def is_aside(self) -> bool:
        """Whether no figure ever counts it: a hop, or a router's view of a success."""
        return bool(self.hop) or (self.vantage is Vantage.ROUTER and self.status is Status.OK)
