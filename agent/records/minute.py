"""One minute of an engine: what it did, how well it used its GPUs and what that cost."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import reduce
from math import fsum
from operator import add
from typing import Annotated, Any, NamedTuple, Self, TypeVar

from agent.catalog.time_units import MINUTE_S
from agent.records.model import Work
from agent.records.record_fields import Length, Mark, UtcSeconds


@dataclass(frozen=True, slots=True)
class Addable:
    """Figures that add up, field by field. The sum of an unknown figure is unknown."""

    def __add__(self, other: Self) -> Self:
        return replace(
            self,
            **{
                field.name: _both(getattr(self, field.name), getattr(other, field.name))
                for field in fields(self)
            },
        )


def _both(mine: float | None, yours: float | None) -> float | None:
    return None if mine is None or yours is None else mine + yours


Part = TypeVar("Part", bound=Addable)


def total(parts: Iterable[Part]) -> Part | None:
    """The sum; None without any part."""
    found = list(parts)
    return reduce(add, found) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost(Addable):
    """An amount that is paid by time, split by what the time was for: dollars or GPU-hours.

    `idle`, `unknown`, `unseen`, `computed`, `cached` and `decode` add up to the whole; the last
    three add up to `requests`. `computed` and `cached` are prefill.
    """

    idle: float = 0.0
    """Cost of time without requests."""
    unknown: float = 0.0
    """Cost of time without samples."""
    unseen: float = 0.0
    """Cost of work that is in no row."""
    aborted: float = 0.0
    """Cost of requests that did not end well; it is in the other parts, too."""
    aborted_prefill: float = 0.0
    """Of `aborted`, the part in prefill."""
    computed: float = 0.0
    """Cost of prompt tokens that were computed."""
    cached: float = 0.0
    """Cost of prompt tokens that a cache served."""
    decode: float = 0.0
    """Cost of decode."""

    def times(self, factor: float) -> "Cost":
        """This cost, multiplied by a factor."""
        return Cost(**{field.name: getattr(self, field.name) * factor for field in fields(self)})

    @property
    def prefill(self) -> float:
        """The part of all prompts."""
        return self.computed + self.cached

    @property
    def requests(self) -> float:
        """The part of all requests with a row, the aborted ones included."""
        return fsum((self.computed, self.cached, self.decode))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork(Addable):
    """What an engine did in some time. Unknown figures are None.

    FLOPs and bytes are the least that the requests with a row needed. `prefill_s` is also None
    if too many prompts have no known prefill time.
    """

    busy_s: float
    """Time in which the engine worked."""
    idle_s: float
    """Time in which it did not."""
    unknown_s: float
    """Time without samples."""
    computed_tokens: float
    """Prompt tokens of rows that were computed."""
    cached_tokens: float
    """Prompt tokens of rows that a cache served."""
    output_tokens: float
    """Output tokens of rows."""
    counted_output_tokens: float
    """Output tokens by the engine's count, requests without a row included."""
    cache_full_s: float
    """Busy time in which the KV cache was full."""
    prefill_s: float | None = None
    """Time in which any request with a row was in prefill."""
    prefill_flops: float | None = None
    """Least FLOPs of prefill, of all GPUs together."""
    prefill_bytes: float | None = None
    """Least bytes that prefill moved, of all GPUs together."""
    decode_s: float | None = None
    """Time in which any request with a row was in decode."""
    decode_flops: float | None = None
    """Least FLOPs of decode, of all GPUs together."""
    decode_bytes: float | None = None
    """Least bytes that decode moved, of all GPUs together."""
    shared_bytes: float | None = None
    """Bytes of weights that one step read for both phases; in the bytes of both."""
    preemptions: float | None = None
    """Requests that lost their place in the batch, by the engine's count."""
    draft_tokens: float | None = None
    """Tokens of drafts that went to verification, by the engine's count."""
    accepted_draft_tokens: float | None = None
    """Draft tokens that verification accepted, by the engine's count."""
    drafts: float | None = None
    """Drafts that went to verification, by the engine's count."""
    prefix_query_tokens: float | None = None
    """Tokens looked up in the prefix cache, by the engine's count."""
    prefix_hit_tokens: float | None = None
    """Tokens found in the prefix cache, by the engine's count."""
    running_request_s: float | None = None
    """Seconds that requests ran, of all of them together, while the most that may run was known."""
    place_s: float | None = None
    """Seconds of the slots for them: that most, times the same time."""
    limited_step_tokens: float | None = None
    """Tokens computed in steps of which the most tokens was known, by the engine's count."""
    step_room_tokens: float | None = None
    """The most tokens that those steps may compute."""

    @property
    def prompt_tokens(self) -> float:
        """Computed and cached."""
        return self.computed_tokens + self.cached_tokens

    @property
    def needed(self) -> Work | None:
        """The work of both phases, with what they share counted once; None if it is unknown."""
        if self.prefill_flops is None or self.decode_flops is None:
            return None
        moved = (self.prefill_bytes or 0.0) + (self.decode_bytes or 0.0)
        return Work(self.prefill_flops + self.decode_flops, moved - (self.shared_bytes or 0.0))

    @property
    def known_s(self) -> float:
        """Busy and idle seconds."""
        return self.busy_s + self.idle_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger(Addable):
    """An engine's counts of some time, and those of the rows; what it does not count is None."""

    input_tokens: float | None = None
    """Prompt tokens that the engine counted."""
    output_tokens: float | None = None
    """Output tokens that the engine counted."""
    requests: float | None = None
    """Requests that the engine counted by their first tokens, each choice for itself."""
    finished: float | None = None
    """Requests that the engine counted as finished."""
    refused: float | None = None
    """Requests that the engine refused to admit."""
    died: float = 0.0
    """Requests that were in the engine when it ended, and have no row."""
    row_input_tokens: float = 0.0
    """Prompt tokens of rows."""
    row_output_tokens: float = 0.0
    """Output tokens of rows."""
    row_requests: float = 0.0
    """Requests with a row, each choice for itself."""
    row_finished: float = 0.0
    """Requests with a row that ended by themselves."""
    row_refused: float = 0.0
    """Requests with a row that were refused."""
    rows_without_tokens: float = 0.0
    """Rows whose tokens are unknown."""


# A minute is due at a multiple of this, and begins at the first sample from there on.
MINUTE_LENGTH_S = MINUTE_S

# Only the last hour of a longer request counts. Otherwise the search for the requests of a
# minute would have to go back to the first request.
LONGEST_REQUEST_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MinuteRow:
    """A stored minute, or older minutes merged into an hour or a day. Unknown figures are None.

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
    counters_mfu: float | None = None
    """MFU of requests of the mean lengths, by the engine's token counters."""
    counters_mbu: float | None = None
    """MBU of requests of the mean lengths, by the engine's token counters."""
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
    """The work of one whole request, and its cost in all stored minutes, by the id of its row.

    FLOPs and bytes of KV cache are None if the model is unknown. `cost_usd` is None if no
    minute has a price, `gpu_hours` if no minute knows its number of GPUs. The cost is not
    `complete` while the request reaches into a minute that is not stored yet.
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
