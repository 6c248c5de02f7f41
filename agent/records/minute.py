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

    Times in Unix seconds. `cost` is in dollars, None without a price. What has no row when the
    ledger is closed has vanished.
    """

    engine: Annotated[str, Length(100)]
    """The engine."""
    model: Annotated[str | None, Length(256)]
    """The model that it served."""
    starts_at: int
    """When the minute was due."""
    from_at: UtcSeconds
    """When the minute began: at a sample."""
    until: UtcSeconds
    """When it ended."""
    gpus: Annotated[int | None, Mark.SMALL]
    """GPUs of the engine."""
    requests: Annotated[int, Mark.SMALL]
    """Requests that ended in it and were worked on."""
    good_tokens: float
    """Output tokens of requests that met all their objectives."""
    method: Annotated[str, Length(10)]
    """How work was weighed."""
    work: EngineWork
    cost: Cost | None = None
    steps: Annotated[str | None, Length(10)] = None
    """Whether the engine counted its steps."""
    peak_flops_per_s: float | None = None
    """Dense peak of all GPUs together."""
    peak_bytes_per_s: float | None = None
    """Memory bandwidth of all GPUs together."""
    engine_mfu: float | None = None
    """MFU by the engine's own estimate."""
    engine_mbu: float | None = None
    """MBU by the engine's own estimate."""
    hardware_mfu: float | None = None
    """MFU by the GPUs' own counters."""
    hardware_mbu: float | None = None
    """MBU by the GPUs' own counters."""
    joules: float | None = None
    """Energy of the GPUs."""
    gpus_usd: float | None = None
    """Dollars for the GPUs."""
    electricity_usd: float | None = None
    """Dollars for their energy."""
    good_tokens_by_objective: Mapping[str, float] | None = None
    """Output tokens of requests that met each objective, by its name."""
    disagreements: tuple[Mapping[str, Any], ...] = ()
    """Figures that two sources disagree about, beyond the margin."""
    ledger: Ledger | None = None
    ledger_closed: bool | None = None
    """Whether no request of the minute is open any more."""
    unmatched: float | None = None
    """Fewest requests in one sample that may be without a row."""

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
