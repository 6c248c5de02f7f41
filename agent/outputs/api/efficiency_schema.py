"""The shapes of answers on efficiency and cost. Unknown is null; names carry units."""

from collections.abc import Mapping
from datetime import datetime

from pydantic import Field

from agent.outputs.api.base_response import BaseResponse


class UseAnswer(BaseResponse):
    """How well the GPUs were used in some time. Null where model or peaks are unknown."""

    mfu: float | None
    mbu: float | None
    achieved_flops_per_s: float | None = Field(default=None, description="of all GPUs together")
    achieved_bytes_per_s: float | None = Field(default=None, description="of all GPUs together")
    flops_per_byte: float | None = None
    ridge_flops_per_byte: float | None = None
    roofline_share: float | None = Field(
        default=None, description="achieved FLOP/s over what the roofline allows there"
    )
    bound: str | None = Field(
        default=None, description="compute-bound, bandwidth-bound or memory-capacity-bound"
    )
    actions: list[str] = Field(default=[], description="what to do about it, best first")


class DisagreementAnswer(BaseResponse):
    """A figure that one source tells as so many times what another does, and likely causes."""

    figure: str
    higher: str
    lower: str
    times: float | None = Field(description="null where the lower one tells 0")
    cause: str | None = Field(default=None, description="a short word for the first of the causes")
    causes: list[str] = Field(description="the likely one first")


class EfficiencyAnswer(BaseResponse):
    """How well the GPUs were used in the minutes that are counted, as far as they are known.

    Idle time is in them, time in which nobody knows what was done is not.
    The phases and `busy` are estimates from the requests, over the time in which they went on.
    """

    counted_from: datetime
    counted_until: datetime
    prefill: UseAnswer | None
    decode: UseAnswer | None
    busy: UseAnswer | None
    sources: Mapping[str, UseAnswer] = Field(
        description="requests and engine are estimates, hardware is measured"
    )
    steps: list[str] = Field(description="counted by the engine, estimated, or both")
    disagreements: list[DisagreementAnswer] = Field(description="of the newest minute")
    rejected_draft_share: float | None = Field(
        description="of the output tokens that were computed, drafts that verification rejected"
    )
    preemptions: float | None = Field(
        description="running requests thrown back, whose tokens are computed again"
    )


class CostAnswer(BaseResponse):
    """Dollars for the minutes that are counted and have a price.

    prefill + decode (aborted requests in them) + unseen + idle + unknown make up the bill, and
    busy is without the last two. Active prices are of busy time spent on requests with a row.
    """

    counted_from: datetime
    counted_until: datetime
    priced_s: float = Field(description="time with a price, of all engines together")
    unpriced_s: float = Field(description="time without one, which is in no other figure in USD")
    bill_usd: float
    busy_usd: float
    prefill_usd: float
    decode_usd: float
    idle_usd: float
    unknown_usd: float = Field(description="time in which the engine was not read")
    unseen_usd: float = Field(description="work of requests without a row")
    aborted_usd: float
    wasted_usd: float = Field(description="unseen and aborted")
    electricity_usd: float | None = Field(description="in the bill; null where not measured")
    usd_per_hour: float = Field(description="of all engines together, at the rate of the bill")
    usd_per_million_input_tokens: float | None
    usd_per_million_computed_input_tokens: float | None
    usd_per_million_cached_input_tokens: float | None
    usd_per_million_output_tokens: float | None
    usd_per_request: float | None = Field(description="active")
    overhead: float | None = Field(description="the bill over the cost of the requests")
    allocated_usd_per_request: float | None = Field(description="the whole bill spread")
    usd_per_million_tokens_within_objective: float | None = Field(
        description="the whole bill over output tokens of requests that met their objectives"
    )
    usd_per_million_tokens_by_objective: Mapping[str, float] = Field(
        description="the same by objective; none that no request met"
    )
    gpu_hours: float | None
    joules: float | None
    joules_per_output_token: float | None = Field(
        description="over all output tokens that engines counted while energy was measured"
    )
    methods: list[str] = Field(description="how prefill and decode were weighed")
