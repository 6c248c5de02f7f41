"""Response models of the API. Unknown is null; names carry units."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

from pydantic import Field

from agent.outputs.api.base_response import BaseResponse
from agent.outputs.api.cause_response import CauseResponse, ExplanationResponse
from agent.outputs.api.efficiency_response import CostResponse, EfficiencyResponse
from agent.outputs.api.ledger_response import LedgerResponse
from agent.outputs.api.request_figures import RequestFigures

Item = TypeVar("Item")

Verdict = Literal["met", "missed", "undetermined"]
Status = Literal["ok", "error", "timeout", "cancelled", "throttled", "invalid"]
Confidence = Literal["certain", "probable", "suspected"]


class ProblemResponse(BaseResponse):
    """What is wrong, in one sentence."""

    detail: str


class ListOf(BaseResponse, Generic[Item]):
    """One page of a list; `next` is the cursor of the following page, null at the end."""

    items: list[Item]
    next: str | None = None


class SummaryResponse(RequestFigures):
    """The figures of the requests that ended in a window."""

    window_from: datetime
    window_until: datetime
    window_s: float
    data_from: datetime | None = Field(
        description="when the stored data begins, of the engine if one is chosen; null without data"
    )
    covered_s: float = Field(description="seconds of the window since data_from; 0 without data")
    relative_error: float = Field(description="of the percentiles")
    simulated: bool = Field(description="true where the engine is the simulator")
    mfu: float | None = Field(default=None, description="of the requests, over all counted time")
    mbu: float | None = Field(default=None, description="of the requests, over all counted time")
    efficiency: EfficiencyResponse | None = None
    cost: CostResponse | None = None
    ledger: LedgerResponse | None = None
    cause_details: list[CauseResponse] = Field(description="the most seconds first")


class StepResponse(RequestFigures):
    """The figures of one step of a time series, which starts at `at`."""

    at: datetime
    window_s: float = Field(description="seconds of the step so far")
    covered_s: float = Field(
        description="those of them since the stored data begins, of the engine if one is chosen"
    )


class Gaps(BaseResponse):
    """Seconds between chunks that held tokens, as the proxy saw them.

    p50 and p99 are within the `relative_error` of the summary.
    """

    p50_s: float | None
    p99_s: float | None
    max_s: float | None
    count: int


class RequestResponse(BaseResponse):
    """One request.

    A request that both the proxy and the engine saw has the vantage `joined`: its latencies, times
    and status are the proxy's, and `engine_...` holds the engine's.
    """

    request_id: str | None
    response_id: str | None = Field(description="the id in the response's body, as the proxy saw")
    trace_id: str
    span_id: str = Field(description="the engine's span, or the proxy's if only that is known")
    parent_span_id: str | None
    proxy_span_id: str | None
    agent: str | None
    engine: str | None
    model: str | None
    service_name: str | None
    tenant: str | None
    route: str | None
    vantage: Literal["engine", "proxy", "joined"]
    started_at: datetime
    ended_at: datetime
    clock_skew_s: float | None = Field(description="set if the times are estimates")
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    max_gap_s: float | None
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    reasoning_tokens: int | None
    preemptions: int | None = Field(description="of the engine's plugin")
    finish_reason: str | None
    status: Status
    http_status: int | None
    verdict: Verdict
    verdicts: Mapping[str, Verdict] = Field(description="by objective")
    cause: str | None = Field(description="why it missed: the cause with the most excess seconds")
    explained_at: datetime | None = Field(
        description="when its causes were stored first; a span that comes late takes them back"
    )
    cost_usd: float | None
    first_byte_s: float | None
    first_visible_s: float | None = Field(description="to the first token that is not reasoning")
    gaps: Gaps | None
    gap_tokens: int | None = Field(description="most tokens in a chunk after the first")
    input_bytes: int | None
    output_bytes: int | None
    error: str | None
    choices: int | None
    streamed: bool | None
    ttft_limit_s: float | None = Field(description="set by the client")
    tpot_limit_s: float | None = Field(description="set by the client")
    requested_model: str | None = Field(
        description="as the client wrote it, if no engine serves such a model"
    )
    requested_tenant: str | None = Field(
        description="as the client wrote it, if the tenant is `other`"
    )
    reasoning_s: float | None = Field(
        description="from the first reasoning token to the first one that is none"
    )
    media_parts: int | None = Field(description="images, audio and video in the messages")
    media_bytes: int | None = Field(description="of the media that the request itself holds")
    priority: int | None = Field(description="vLLM's, of its header or the body")
    end_user: str | None = Field(description="of `proxy.user_header`")
    workload: str | None = Field(description="of `proxy.workload_header`")
    session: str | None = Field(description="of `proxy.session_header`")
    engine_request_id: str | None
    engine_status: Status | None
    engine_ttft_s: float | None
    engine_tpot_s: float | None
    engine_e2e_s: float | None
    holdback_s: float | None = Field(description="ttft_s less engine_ttft_s")
    front_s: float | None = Field(description="ttft_s less queue_s and prefill_s")
    rest_s: float | None = Field(
        description="e2e_s less queue_s, prefill_s, decode_s and front_s: after the last token, "
        "and what the views differ by"
    )
    settles_at: datetime | None = Field(
        description="set while another view may come: until then the verdict may change and no "
        "figure counts the request"
    )
    counted: bool = Field(description="whether summaries and series count it")
    priced_at: datetime | None = Field(
        description="null until all its minutes are counted; until then its cost may grow"
    )
    gpu_hours: float | None = Field(description="its share of all GPU hours")
    prefill_flops: float | None = Field(description="an estimate, as the three below")
    prefill_kv_bytes: float | None
    decode_flops: float | None
    decode_kv_bytes: float | None
    part: bool = Field(description="true for a span that belongs to the request of another row")


class RequestView(BaseResponse):
    """One view of a request. Latencies are from the arrival there."""

    request_id: str | None
    span_id: str | None = Field(
        default=None, description="null where the response itself had the engine's times"
    )
    status: Status
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None


class RequestViews(BaseResponse):
    """The views of a request, null for one that is missing."""

    proxy: RequestView | None
    engine: RequestView | None


class RequestDetail(RequestResponse):
    """A request, and the other spans with its id: of n > 1, or of clients that repeat ids."""

    views: RequestViews
    explanation: ExplanationResponse | None = Field(description="null unless it missed")
    others: list[RequestResponse]


class EventResponse(BaseResponse):
    """An event of an engine or a GPU."""

    at: datetime
    agent: str
    engine: str | None
    gpu: str | None
    kind: str
    confidence: Confidence
    evidence: Mapping[str, Any]


class EngineResponse(BaseResponse):
    """An engine that an agent watches; `up` is false if the last scrape failed."""

    name: str
    agent: str
    up: bool | None = Field(description="null where that is not known")
    problem: str | None = Field(default=None, description="why it is not known")
    model: str | None
    dialect: str | None
    read_at: datetime | None
    running: float | None = Field(default=None, description="requests in the engine's batch")
    waiting: float | None = Field(default=None, description="requests in its queue")
    kv_cache_usage: float | None = Field(default=None, description="share of the KV cache in use")
    ejected: str | None = Field(
        default=None,
        description="why the proxy sends it no new requests, such as `error 500`; null if it does",
    )


class ProcessResponse(BaseResponse):
    """A process on a GPU, by its process id on the host."""

    pid: int
    memory_bytes: int | None = Field(description="null where the driver withholds it")


class MigInstanceResponse(BaseResponse):
    """A MIG instance of a GPU; its `facts` have the same names as those of GPUs."""

    uuid: str
    name: str
    gpu_instance: int | None
    compute_instance: int | None
    gpu_slices: int | None
    facts: Mapping[str, float | None]
    processes: list[ProcessResponse] | None


class GpuResponse(BaseResponse):
    """One sample of a GPU."""

    gpu: str = Field(description="the UUID; the index may change")
    index: int
    name: str
    at: datetime
    agent: str
    problem: str | None = Field(description="why the GPU could not be read")
    facts: Mapping[str, float | None] = Field(
        description="by name, with labels in braces; unknown facts are absent"
    )
    processes: list[ProcessResponse] | None = Field(description="null if they could not be read")
    mig_instances: list[MigInstanceResponse]


class HealthResponse(BaseResponse):
    """Whether the agent can work, and what prevents it."""

    status: Literal["ok", "not ready"]
    problems: list[str]


class ReadinessResponse(HealthResponse):
    """The same, and each part of the agent in words."""

    parts: dict[str, str]
