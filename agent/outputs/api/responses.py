"""Response models of the API. Unknown is null; names carry units."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

from pydantic import Field

from agent.outputs.api.base_response import BaseResponse
from agent.outputs.api.efficiency_response import CostResponse, EfficiencyResponse

Item = TypeVar("Item")

Verdict = Literal["met", "missed", "undetermined"]
Status = Literal["ok", "error", "timeout", "cancelled", "throttled"]
Confidence = Literal["certain", "probable", "suspected"]


class ProblemResponse(BaseResponse):
    """What is wrong, in one sentence."""

    detail: str


class ListOf(BaseResponse, Generic[Item]):
    """One page of a list; `next` is the cursor of the following page, null at the end."""

    items: list[Item]
    next: str | None = None


class Percentiles(BaseResponse):
    """Milliseconds, each within `relative_error` of a real request's value; null if unseen."""

    p50: float | None
    p95: float | None
    p99: float | None


class RequestFigures(BaseResponse):
    """What users got. Rates are per second of the window, goodput counts requests that met."""

    requests: int
    met: int
    missed: int
    undetermined: int
    attainment: float | None = Field(description="met / (met + missed)")
    goodput_rps: float
    goodput_tokens_per_s: float | None
    throughput_rps: float = Field(description="requests that ended well, per second")
    input_tokens_per_s: float | None
    output_tokens_per_s: float | None
    error_ratio: float | None = Field(description="null where failures cannot be seen")
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    e2e_ms: Percentiles
    queue_ms: Percentiles


class SummaryResponse(RequestFigures):
    """The figures of a window, by the time that requests ended."""

    window_from: datetime
    window_until: datetime
    window_s: float
    relative_error: float = Field(description="of the percentiles")
    simulated: bool = Field(description="true where a simulator is watched, not an engine")
    mfu: float | None = Field(default=None, description="of the requests, over all the time")
    mbu: float | None = Field(default=None, description="of the requests, over all the time")
    efficiency: EfficiencyResponse | None = None
    cost: CostResponse | None = None
    causes: Mapping[str, float] | None = None


class StepResponse(RequestFigures):
    """The figures of one step of a time series, which starts at `at`."""

    at: datetime
    window_s: float = Field(description="seconds of the step that have passed; rates are per these")


class Gaps(BaseResponse):
    """Seconds between chunks that held tokens, as the proxy saw them.

    p50 and p99 are within the `relative_error` of the summary.
    """

    p50_s: float | None
    p99_s: float | None
    max_s: float | None
    count: int


class RequestResponse(BaseResponse):
    """One request as it was seen.

    A request that both the proxy and the engine saw is one, of vantage `joined`: latencies, moments
    and how it ended are the proxy's, `engine_...` is what the engine told of the same.
    """

    request_id: str | None
    trace_id: str
    span_id: str = Field(description="the engine's span, or the proxy's where only that is known")
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
    clock_skew_s: float | None = Field(description="set where the times are estimates")
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
    finish_reason: str | None
    status: Status
    http_status: int | None
    verdict: Verdict
    verdicts: Mapping[str, Verdict] = Field(description="by objective")
    cause: str | None
    cost_usd: float | None
    first_byte_s: float | None
    first_visible_s: float | None = Field(description="to the first token that is no reasoning")
    gaps: Gaps | None
    gap_tokens: int | None = Field(description="most tokens in a chunk after the first")
    input_bytes: int | None
    output_bytes: int | None
    error: str | None
    choices: int | None
    streamed: bool | None
    ttft_limit_s: float | None = Field(description="that the client asked for")
    tpot_limit_s: float | None = Field(description="that the client asked for")
    engine_request_id: str | None
    engine_status: Status | None
    engine_ttft_s: float | None
    engine_tpot_s: float | None
    engine_e2e_s: float | None
    holdback_s: float | None = Field(description="ttft_s less engine_ttft_s")
    settles_at: datetime | None = Field(
        description="set while another view may come: the verdict may change till then, and no "
        "figure counts the request yet"
    )
    counted: bool = Field(description="whether figures about many requests count it")
    priced_at: datetime | None = Field(
        description="null until all minutes that it lasted are counted; the cost may grow till then"
    )
    gpu_hours: float | None = Field(description="its share of the hours of all GPUs")
    prefill_flops: float | None = Field(description="an estimate, as the three below")
    prefill_kv_bytes: float | None
    decode_flops: float | None
    decode_kv_bytes: float | None
    part: bool = Field(description="true for a span of a request that another row stands for")


class RequestView(BaseResponse):
    """What was seen of a request from one place. Latencies are from the arrival there."""

    request_id: str | None
    span_id: str
    status: Status
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None


class RequestViews(BaseResponse):
    """Each view of a request, null where it was not seen."""

    proxy: RequestView | None
    engine: RequestView | None


class RequestDetail(RequestResponse):
    """A request, and the other spans that carry its id: of n > 1, or of clients that repeat ids."""

    views: RequestViews
    others: list[RequestResponse]


class EventResponse(BaseResponse):
    """Something that happened to an engine or a GPU."""

    at: datetime
    agent: str
    engine: str | None
    gpu: str | None
    kind: str
    confidence: Confidence
    evidence: Mapping[str, Any]


class TrafficPromiseResponse(BaseResponse):
    """A promise on the traffic as a whole, which takes no part in the verdict on a request."""

    name: str
    limit: float
    seen: float | None
    holds: bool | None


class ObjectiveResponse(BaseResponse):
    """A promise that an agent judges by now, and what became of it in the window."""

    name: str
    agent: str
    in_force_from: datetime
    definition: Mapping[str, Any]
    window_s: float
    requests: int
    met: int
    missed: int
    undetermined: int
    attainment: float | None = Field(description="met / (met + missed)")
    traffic: list[TrafficPromiseResponse]


class EngineResponse(BaseResponse):
    """A watched engine; `up` is false where its page could not be read at the last try."""

    name: str
    up: bool
    model: str | None
    dialect: str | None
    read_at: datetime | None


class ProcessResponse(BaseResponse):
    """A process on a GPU, by the number that the host gives it."""

    pid: int
    memory_bytes: int | None = Field(description="null where the driver withholds it")


class MigInstanceResponse(BaseResponse):
    """A slice of a GPU under MIG; `facts` has the names of a GPU's, as far as they apply."""

    uuid: str
    name: str
    gpu_instance: int | None
    compute_instance: int | None
    gpu_slices: int | None
    facts: Mapping[str, float | None]
    processes: list[ProcessResponse] | None


class GpuResponse(BaseResponse):
    """One reading of a GPU, as an agent told it."""

    gpu: str = Field(description="the UUID, which stays when the index does not")
    index: int
    name: str
    at: datetime
    agent: str
    problem: str | None = Field(description="why the GPU, seen before, could not be read")
    facts: Mapping[str, float | None] = Field(
        description="by name, its labels in braces; what the GPU does not tell is absent"
    )
    processes: list[ProcessResponse] | None = Field(description="null where they could not be read")
    mig_instances: list[MigInstanceResponse]


class HealthResponse(BaseResponse):
    """Whether the agent can do its work, and if not, why."""

    status: Literal["ok", "not ready"]
    problems: list[str]
