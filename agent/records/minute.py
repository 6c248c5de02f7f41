"""One minute of an engine: what it did, how well it used its GPUs, and what that cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent.records.request import RequestRecord

# A window begins on a mark of this grid, or at the first reading that follows it soon.
MINUTE_S = 60

# Of a request that lasts longer only the end counts: what looks for the requests of a window must
# not go back to the first one.
LONGEST_REQUEST_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MinuteRow:
    """What a window of an engine came to; what is not known is None.

    `starts_at` is its mark in Unix seconds, `from_at` and `until` are its edges. `requests` that
    were worked on ended in it, and `good_tokens` are the output tokens of those that met their
    objectives; the other tokens are those of all requests with a row that fall into it.
    `counted_output_tokens` are those that the engine counted, also for requests without a row. In
    `cache_full_s` of `busy_s` the KV cache held no more requests. Seconds, FLOPs and bytes of a
    phase are those of all GPUs together, as the peaks are; weights that both phases read together
    are in the bytes of both, `shared_bytes` of them. `prefill_s` is None too where of too many
    prompts nobody saw how long they took. Dollars of requests that ended otherwise than well are
    `aborted_usd`, which are in `computed_usd`, `cached_usd` and `decode_usd` too; its part in
    prefill is `aborted_prefill_usd`. `steps` says whether the engine counted its steps, `method`
    how prefill was weighed against decode.
    """

    engine: str
    model: str | None
    starts_at: int
    from_at: float
    until: float
    gpus: int | None
    requests: int
    busy_s: float
    idle_s: float
    unknown_s: float
    computed_tokens: float
    cached_tokens: float
    output_tokens: float
    good_tokens: float
    counted_output_tokens: float
    cache_full_s: float
    method: str
    steps: str | None = None
    prefill_s: float | None = None
    prefill_flops: float | None = None
    prefill_bytes: float | None = None
    decode_s: float | None = None
    decode_flops: float | None = None
    decode_bytes: float | None = None
    shared_bytes: float | None = None
    peak_flops_per_s: float | None = None
    peak_bytes_per_s: float | None = None
    engine_mfu: float | None = None
    engine_mbu: float | None = None
    hardware_mfu: float | None = None
    hardware_mbu: float | None = None
    preemptions: float | None = None
    draft_tokens: float | None = None
    accepted_draft_tokens: float | None = None
    joules: float | None = None
    gpus_usd: float | None = None
    electricity_usd: float | None = None
    idle_usd: float | None = None
    unknown_usd: float | None = None
    unseen_usd: float | None = None
    aborted_usd: float | None = None
    aborted_prefill_usd: float | None = None
    computed_usd: float | None = None
    cached_usd: float | None = None
    decode_usd: float | None = None
    good_tokens_by_objective: Mapping[str, float] | None = None
    disagreements: tuple[Mapping[str, Any], ...] = ()

    @property
    def length_s(self) -> float:
        """Seconds of the window."""
        return self.until - self.from_at

    @property
    def bill_usd(self) -> float | None:
        """All that it cost; None without a price."""
        return None if self.gpus_usd is None else self.gpus_usd + (self.electricity_usd or 0.0)


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A counted request, the number of its row, and whether it met its objectives.

    `met_objectives` are those that it met. It is `priced` when windows gave it a part.
    """

    row: int
    record: RequestRecord
    met: bool
    priced: bool = False
    met_objectives: tuple[str, ...] = ()

    @property
    def from_at(self) -> float:
        """Where its windows begin."""
        return max(self.record.started_at, self.record.ended_at - LONGEST_REQUEST_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCost:
    """What a request, by the number of its row, was to the GPUs, and cost in all its windows.

    FLOPs, and bytes of KV cache, are of the whole request; those of several requests add up. None
    where the model is unknown, or the cost where nothing of its time has a price. `gpu_hours` are
    its share of the hours of all GPUs, None where it is not known how many there are. A request
    that is not `whole` reaches into a window that is not counted yet.
    """

    row: int
    vantage: str
    whole: bool
    cost_usd: float | None
    gpu_hours: float | None = None
    prefill_flops: float | None = None
    prefill_kv_bytes: float | None = None
    decode_flops: float | None = None
    decode_kv_bytes: float | None = None
