"""One booked minute of an engine: what it did, how well it used its GPUs and what that cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from agent.catalog.time_units import MINUTE_S
from agent.records.cost_and_work import Cost, EngineWork
from agent.records.ledger import Ledger
from agent.records.record_fields import Length, Mark, UtcSeconds

# A minute is due at a multiple of this, and begins at the first sample from there on.
BOOK_EVERY_S = MINUTE_S

# Only the last hour of a longer request is booked. Otherwise the search for the requests of a
# minute would have to go back to the first request.
LONGEST_REQUEST_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MinuteRow:
    """A booked minute, or older minutes merged into an hour or a day. Unknown figures are None.

    - Time, in Unix seconds: `starts_at` is when the minute was due, `from_at` and `until` are its
      ends.
    - `requests` ended in it and were worked on. `good_tokens` are the output tokens of those that
      met all their objectives, `good_tokens_by_objective` of those that met each one.
    - Peaks are of all GPUs together. `cost` is in dollars, None without a price.
    - `steps`: whether the engine counted its steps. `method`: how work was weighed.
    - At least one sample had as few as `unmatched` requests that may be without a row.
      `ledger_closed`: no request of the minute is open any more, so that what has no row by now has
      vanished.
    """

    engine: Annotated[str, Length(100)]
    model: Annotated[str | None, Length(256)]
    starts_at: int
    from_at: UtcSeconds
    until: UtcSeconds
    gpus: Annotated[int | None, Mark.SMALL]
    requests: Annotated[int, Mark.SMALL]
    good_tokens: float
    method: Annotated[str, Length(10)]
    work: EngineWork
    cost: Cost | None = None
    steps: Annotated[str | None, Length(10)] = None
    peak_flops_per_s: float | None = None
    peak_bytes_per_s: float | None = None
    engine_mfu: float | None = None
    engine_mbu: float | None = None
    hardware_mfu: float | None = None
    hardware_mbu: float | None = None
    joules: float | None = None
    gpus_usd: float | None = None
    electricity_usd: float | None = None
    good_tokens_by_objective: Mapping[str, float] | None = None
    disagreements: tuple[Mapping[str, Any], ...] = ()
    ledger: Ledger | None = None
    ledger_closed: bool | None = None
    unmatched: float | None = None

    @property
    def length_s(self) -> float:
        """Seconds from end to end."""
        return self.until - self.from_at

    @property
    def bill_usd(self) -> float | None:
        """GPUs and electricity; None without a price."""
        return None if self.gpus_usd is None else self.gpus_usd + (self.electricity_usd or 0.0)


class RequestCost(NamedTuple):
    """The work of one whole request, and its cost in all booked minutes, by the id of its row.

    FLOPs and bytes of KV cache are None where the model is unknown. `cost_usd` is None where no
    minute has a price, `gpu_hours` where no minute knows its number of GPUs. The cost is not
    `complete` while the request reaches into a minute that is not booked yet.
    """

    row: int
    vantage: str
    complete: bool
    cost_usd: float | None
    gpu_hours: float | None = None
    prefill_flops: float | None = None
    prefill_kv_bytes: float | None = None
    decode_flops: float | None = None
    decode_kv_bytes: float | None = None
