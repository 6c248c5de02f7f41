"""What some time of an engine cost and what the engine did in it; both add up over minutes."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import reduce
from math import fsum
from operator import add
from typing import Annotated, Self, TypeVar

from agent.records.model import Work
from agent.records.record_fields import Mark


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
    three add up to `requests`. `computed` and `cached` are prefill. `aborted` is the part of
    requests that did not end well, and `aborted_prefill` its part in prefill.
    """

    idle: float = 0.0
    unknown: float = 0.0
    unseen: float = 0.0
    aborted: float = 0.0
    aborted_prefill: float = 0.0
    computed: float = 0.0
    cached: float = 0.0
    decode: float = 0.0

    def times(self, factor: float) -> "Cost":
        """This cost, so many times."""
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

    - In `cache_full_s` of `busy_s` the KV cache held no more requests.
    - Tokens are those that requests with a row had in this time; `counted_output_tokens` are the
      engine's count, which includes requests without a row.
    - Seconds of a phase are those in which any request with a row was in it. Its FLOPs and bytes
      are the least that these requests needed, of all GPUs together. Weights that one step read for
      both phases are in the bytes of both; `shared_bytes` of them. `prefill_s` is also None where
      too many prompts have no known prefill time.
    - Drafts and tokens looked up and found in the prefix cache are the engine's own counts.
    """

    busy_s: float
    idle_s: float
    unknown_s: float
    computed_tokens: float
    cached_tokens: float
    output_tokens: float
    counted_output_tokens: Annotated[float, Mark.DEFAULT_ZERO]
    cache_full_s: Annotated[float, Mark.DEFAULT_ZERO]
    prefill_s: float | None = None
    prefill_flops: float | None = None
    prefill_bytes: float | None = None
    decode_s: float | None = None
    decode_flops: float | None = None
    decode_bytes: float | None = None
    shared_bytes: float | None = None
    preemptions: float | None = None
    draft_tokens: float | None = None
    accepted_draft_tokens: float | None = None
    drafts: float | None = None
    prefix_query_tokens: float | None = None
    prefix_hit_tokens: float | None = None

    @property
    def prompt_tokens(self) -> float:
        """Computed and cached."""
        return self.computed_tokens + self.cached_tokens

    @property
    def needed(self) -> Work | None:
        """The work of both phases, with what they share counted once; None where it is unknown."""
        if self.prefill_flops is None or self.decode_flops is None:
            return None
        moved = (self.prefill_bytes or 0.0) + (self.decode_bytes or 0.0)
        return Work(self.prefill_flops + self.decode_flops, moved - (self.shared_bytes or 0.0))

    @property
    def known_s(self) -> float:
        """Busy and idle seconds."""
        return self.busy_s + self.idle_s
