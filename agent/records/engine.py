"""What an engine reports: samples of its exposition, and its plugin's steps and ended requests."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.records.gpu import Facts


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Cumulative counts of one engine histogram, one per bound; the last bound is +inf."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """One sample of one engine, merged over its data-parallel ranks.

    `facts` maps (fact name, label values in the fact's own order) to a number;
    `histograms` maps a fact name to its snapshot. Unknown facts are absent. With several ranks,
    `ranks` has the facts of each one that show whether it computes; they are not stored.
    """

    engine: str
    at: float
    dialect: str
    model: str | None
    facts: Facts
    histograms: Mapping[str, HistogramSnapshot] = field(default_factory=dict)
    process_started_at: float | None = None
    ranks: Mapping[str, "EngineSample"] = field(default_factory=dict)

    def fact(self, name: str, *labels: str) -> float | None:
        """Return the value of one fact, None if unknown."""
        return self.facts.get((name, labels))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """The sender of a span: the configured engine and its model, None if unknown."""

    engine: str | None
    model: str | None


class EngineStep(NamedTuple):
    """One step of an engine. Times in Unix seconds, durations in seconds, unknown None.

    `duration_s` is the time since the last step ended, or the engine's own measure of the step. It
    is unknown of the first step after the engine was idle. `waiting_capacity` and
    `waiting_deferred` are the requests that waited at its end; of the deferred ones,
    `waiting_kv_transfer` waited for KV from elsewhere. `kv_usage` is from 0 to 1. `preempted`
    counts requests that run again after a preemption. `rank` is the data-parallel one.

    With `tokens_of_step`, `prefill_tokens` and `decode_tokens` were computed in this step.
    Otherwise `prefill_tokens` are all tokens computed of the prompts whose prefill ended in it.
    """

    engine: str
    ended_at: float
    duration_s: float | None
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting_capacity: int
    waiting_deferred: int
    kv_usage: float
    preempted: int
    waiting_kv_transfer: int = 0
    rank: int = 0
    tokens_of_step: bool = False


class EndedRequest(NamedTuple):
    """A request that the engine finished or dropped, with the engine's own figures.

    `request_id` is that of the request's span. Durations in seconds, unknown None. `finish_reason`
    is `abort` if the client left or the engine dropped the request.
    """

    engine: str
    request_id: str
    ended_at: float
    finish_reason: str
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    preemptions: int
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    e2e_s: float | None
    ttft_s: float | None = None
