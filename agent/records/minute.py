"""One minute of an engine: tokens, phases, efficiency of its GPUs, and cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent.records.request import RequestRecord

# A minute begins on a multiple of this, or at the first sample soon after it.
MINUTE_S = 60

# Only the end of a longer request is booked. Without a bound, the query for a minute's requests
# would read the whole table.
LONGEST_REQUEST_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MinuteRow:
    """The books of one minute of an engine; unknown is None.

    - Time: `starts_at` is the minute in Unix seconds, `from_at` and `until` are its real bounds.
      In `cache_full_s` of `busy_s` the KV cache was full.
    - Tokens: `requests` ended in the minute, and `good_tokens` are the output tokens of those that
      met their objectives. Other tokens are those in the minute, of requests with a row.
      `counted_output_tokens` are the engine's count, which includes requests without a row.
    - Phases: seconds, FLOPs, bytes and peaks are sums over all GPUs. Weights that both phases read
      in one step are in the bytes of both; `shared_bytes` of them. `prefill_s` is also None if the
      duration of too many prompts is unknown.
    - Dollars: `aborted_usd` is the part of requests that did not end well, and is also in
      `computed_usd`, `cached_usd` and `decode_usd`; `aborted_prefill_usd` is its prefill part.
    - `steps` is whether the engine counted its steps, `method` how prefill and decode were split.
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
        """Length of the minute in seconds."""
        return self.until - self.from_at

    @property
    def bill_usd(self) -> float | None:
        """The whole cost; None without a price."""
        return None if self.gpus_usd is None else self.gpus_usd + (self.electricity_usd or 0.0)


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A counted request, its row number, and whether it met its objectives.

    `met_objectives` are the names of those it met. `priced`: it already has a share of minutes.
    """

    row: int
    record: RequestRecord
    met: bool
    priced: bool = False
    met_objectives: tuple[str, ...] = ()

    @property
    def from_at(self) -> float:
        """The begin of its first minute."""
        return max(self.record.started_at, self.record.ended_at - LONGEST_REQUEST_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCost:
    """Work and cost of a request, by its row number, over all its minutes.

    FLOPs and bytes of KV cache are those of the whole request, and add up over requests. They are
    None if the model is unknown, the cost if no part of its time has a price. `gpu_hours` is its
    share of the hours of all GPUs, None if their number is unknown. A request that is not `whole`
    extends into a minute that is not booked yet.
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
