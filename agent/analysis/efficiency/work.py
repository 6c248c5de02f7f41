"""The work of requests for a model on its GPUs, prefill and decode apart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from agent.analysis.efficiency.engine_observation import EngineObservation
from agent.analysis.efficiency.request_activity import Activities, TimeRange, TimeRanges, covered_s
from agent.analysis.physics import (
    Coefficients,
    Roof,
    coefficients,
    decode_flops,
    decode_kv_bytes,
    prefill_flops,
    prefill_kv_bytes,
    step_weight_bytes,
)
from agent.catalog import engine_facts as fact
from agent.catalog.hardware import GpuModel
from agent.records.columns import Array, Integers, Mask
from agent.records.model import ModelShape, Parallelism, StoredWeights, Work

_NO_WORK = Work(0.0, 0.0)


class Role(StrEnum):
    """The phases that an engine does. In disaggregated serving each engine does one."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A model spread over GPUs of one kind; `model` and `gpu` are None if they are unknown.

    `weights` are known of a model whose architecture is unknown; `model` is None then.
    """

    model: ModelShape | None = None
    weights: StoredWeights | None = None
    gpu: GpuModel | None = None
    parallelism: Parallelism = field(default_factory=Parallelism)
    role: Role = Role.BOTH
    coefficients: Coefficients | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        found = None if self.model is None else coefficients(self.model)
        object.__setattr__(self, "coefficients", found)

    @property
    def knows_weights(self) -> bool:
        """Whether the bytes of weights that a step reads are known."""
        weights = self.weights
        return self.model is not None or (weights is not None and weights.step_bytes is not None)

    @property
    def peak_flops_per_s(self) -> float | None:
        """The dense peak of all GPUs together, in the precision of the model's products."""
        if self.gpu is None or self.model is None:
            return None
        peak = self.gpu.peak(self.model.compute)
        return None if peak is None else peak * self.parallelism.gpus

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """The memory bandwidth of all GPUs together."""
        if self.gpu is None:
            return None
        return self.gpu.bandwidth_bytes_per_s * self.parallelism.gpus

    @property
    def roof(self) -> Roof | None:
        """Peak and bandwidth; None if either is unknown."""
        peak, bandwidth = self.peak_flops_per_s, self.bandwidth_bytes_per_s
        return None if peak is None or bandwidth is None else Roof(peak, bandwidth)

    def utilisation(self, work: Work, seconds: float) -> tuple[float | None, float | None]:
        """(MFU, MBU) of work that all GPUs shared: ratios of what they could do in that time.

        Each is None if its peak is unknown or no time passed. More than 1 means a wrong peak or
        a wrong model.
        """
        if seconds <= 0:
            return None, None
        peak, bandwidth = self.peak_flops_per_s, self.bandwidth_bytes_per_s
        return (
            None if peak is None else work.flops / (seconds * peak),
            None if bandwidth is None else work.bytes_moved / (seconds * bandwidth),
        )

    def prefill(self, new: int, cached: int) -> Work:
        """Work of `new` prompt tokens after `cached` ones, without weights; 0 without a model."""
        if self.coefficients is None:
            return _NO_WORK
        return Work(
            prefill_flops(self.coefficients, new + cached, cached),
            prefill_kv_bytes(self.coefficients, new, cached, self.parallelism.tensor),
        )

    def decode(self, prompt: int, output: int) -> Work:
        """Work of all output tokens but the first, without weights; 0 without a model."""
        if self.coefficients is None:
            return _NO_WORK
        return Work(
            decode_flops(self.coefficients, prompt, output),
            decode_kv_bytes(self.coefficients, prompt, output, self.parallelism.tensor),
        )

    def weight_bytes(self, steps: float, tokens: float) -> float:
        """Bytes of weights that `steps` of single ranks read for `tokens` in all.

        Data-parallel ranks step together and share experts. Each rank reads its part of the experts
        that the tokens of all ranks use.
        """
        if steps <= 0:
            return 0.0
        if self.model is None:
            return steps * ((self.weights and self.weights.step_bytes) or 0.0)
        ranks, each = self.parallelism.data, tokens / steps
        dense = step_weight_bytes(self.model, 0)
        experts = step_weight_bytes(self.model, each * ranks) - dense
        return steps * (dense + experts / ranks)


class TokenWork(NamedTuple):
    """Tokens with their FLOPs and bytes of KV cache, which are 0 if the model is unknown."""

    tokens: float = 0.0
    flops: float = 0.0
    kv_bytes: float = 0.0

    def times(self, factor: float) -> "TokenWork":
        """This work, multiplied by a factor."""
        return TokenWork(*[value * factor for value in self])

    def plus(self, other: "TokenWork") -> "TokenWork":
        """The sum of both."""
        return TokenWork(*[mine + yours for mine, yours in zip(self, other, strict=True)])


class TokenWorks(NamedTuple):
    """The work of many requests: one value for each."""

    tokens: Array
    flops: Array
    kv_bytes: Array

    @classmethod
    def none(cls, count: int) -> "TokenWorks":
        """No work for each of `count` requests."""
        return cls(*np.zeros((3, count)))

    @classmethod
    def of(cls, works: Sequence[TokenWork]) -> "TokenWorks":
        """The work of each."""
        return cls(*np.array(works, dtype=np.float64).reshape(-1, 3).T)

    def times(self, factors: Array) -> "TokenWorks":
        """The work of each request, multiplied by its factor."""
        return TokenWorks(*[values * factors for values in self])

    def plus(self, other: "TokenWorks") -> "TokenWorks":
        """The sums of both."""
        return TokenWorks(*[mine + yours for mine, yours in zip(self, other, strict=True)])

    def where(self, some: Mask) -> "TokenWorks":
        """The work of the requests in `some`, and none for the others."""
        return TokenWorks(*[np.where(some, values, 0.0) for values in self])

    def chosen(self, which: Mask | Integers) -> "TokenWorks":
        """Some of them."""
        return TokenWorks(*[values[which] for values in self])

    def total(self) -> TokenWork:
        """The sum."""
        return TokenWork(*[float(values.sum()) for values in self])


@dataclass(frozen=True, slots=True, eq=False)
class RequestWorks:
    """The work of requests, or the parts of it that lie in some time.

    `computed` and `cached` together are their prefill. `cached` is what the cached parts of prompts
    add: reading them and the scores over them. Its tokens are 0, because none of them is computed;
    `cached_tokens` counts them. `decode` leaves out the first output token of each choice, which
    prefill computes; `output_tokens` has all of them.
    """

    active: Activities
    computed: TokenWorks
    cached: TokenWorks
    decode: TokenWorks
    cached_tokens: Array
    output_tokens: Array

    @property
    def prefill(self) -> TokenWorks:
        """All of their prefill."""
        return self.computed.plus(self.cached)

    @property
    def prefills(self) -> Mask:
        """Those with work in prefill."""
        tokens, flops, _ = self.prefill
        return (tokens > 0) | (flops > 0)

    @property
    def decodes(self) -> Mask:
        """Those with work in decode."""
        return self.decode.tokens > 0

    @property
    def prefill_time(self) -> TimeRanges:
        """When whole requests' prefill was: any time, if its end or any decode is unknown."""
        alone = ~self.decodes | (self.active.prefill.length_s == 0)
        until = np.where(alone, self.active.last_at, self.active.first_at)
        return _lasting(self.active.begin_at, until)

    @property
    def decode_time(self) -> TimeRanges:
        """When whole requests' decode was: any time, if no prefill is known."""
        from_at = np.where(self.prefills, self.active.first_at, self.active.begin_at)
        return _lasting(from_at, self.active.last_at)

    def chosen(self, which: Mask | Integers) -> "RequestWorks":
        """Those of some requests."""
        return RequestWorks(
            self.active.chosen(which),
            self.computed.chosen(which),
            self.cached.chosen(which),
            self.decode.chosen(which),
            self.cached_tokens[which],
            self.output_tokens[which],
        )

    def part_in(self, time: TimeRange) -> "RequestWorks":
        """The parts of whole requests in `time`, without requests that have none there."""
        some = self.chosen(self.have_part_in(time))
        in_prefill, in_decode = some.prefill_time.share_in(time), some.decode_time.share_in(time)
        return RequestWorks(
            some.active,
            some.computed.times(in_prefill),
            some.cached.times(in_prefill),
            some.decode.times(in_decode),
            some.cached_tokens * in_prefill,
            some.active.first_in(time) + some.active.decoded_tokens * in_decode,
        )

    def have_part_in(self, time: TimeRange) -> Mask:
        """The whole requests with a part in `time`."""
        return (self.prefill_time.share_in(time) > 0) | (self.decode_time.share_in(time) > 0)


# A phase of no length has at least this one, so that its work is somewhere.
_SHORTEST_S = 1e-3


def _lasting(from_at: Array, until: Array) -> TimeRanges:
    return TimeRanges(from_at, np.maximum(until, from_at + _SHORTEST_S))


class StepSource(StrEnum):
    """Where a number of steps comes from; the values are stored."""

    COUNTED = "counted"
    ESTIMATED = "estimated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps of single ranks. A step that decodes any token is in `decode`, also if it prefills."""

    prefill: float
    decode: float
    source: StepSource


def whole_works(active: Activities, serving: Serving) -> RequestWorks:
    """The whole work of each request."""
    nothing = TokenWorks.none(active.rows.size)
    computed, cached, decode = nothing, nothing, nothing
    if serving.role is not Role.DECODE:
        computed, cached = _prefill_parts(active, serving)
    if serving.role is not Role.PREFILL:
        decode = decode_work(active, serving)
    return RequestWorks(
        active, computed, cached, decode, active.cached_tokens, active.output_tokens
    )


def _prefill_parts(active: Activities, serving: Serving) -> tuple[TokenWorks, TokenWorks]:
    """Whole prefills: their computed tokens as if alone, and what the cached ones add."""
    new, cached = active.computed_tokens, active.cached_tokens
    whole = _each(serving, serving.prefill, new, cached).where(new + cached > 0)
    alone = _each(serving, serving.prefill, new, np.zeros_like(new)).where(new > 0)
    more = TokenWorks(0 * new, whole.flops - alone.flops, whole.kv_bytes - alone.kv_bytes)
    return alone._replace(tokens=new), more


def prefill_work(active: Activities, serving: Serving) -> TokenWorks:
    """The whole prefill of each request; none on an engine that only decodes."""
    if serving.role is Role.DECODE:
        return TokenWorks.none(active.rows.size)
    found = _each(serving, serving.prefill, active.computed_tokens, active.cached_tokens)
    return found._replace(tokens=active.computed_tokens)


def decode_work(active: Activities, serving: Serving) -> TokenWorks:
    """The whole decode of each request; none on an engine that only prefills.

    Each choice continues the prompt with an equal part of the output tokens.
    """
    if serving.role is Role.PREFILL:
        return TokenWorks.none(active.rows.size)
    prompt = active.computed_tokens + active.cached_tokens
    each, more = np.divmod(active.output_tokens, active.choices)
    found = _each(serving, serving.decode, prompt, each).times(active.choices - more)
    uneven = np.flatnonzero(more)
    longer = _each(serving, serving.decode, prompt[uneven], each[uneven] + 1).times(more[uneven])
    for whole, part in zip(found, longer, strict=True):
        whole[uneven] += part
    return found._replace(tokens=active.decoded_tokens)


def _each(
    serving: Serving, work: Callable[[int, int], Work], first: Array, second: Array
) -> TokenWorks:
    """The work of each pair of counts, computed once for those that are equal; without tokens."""
    if serving.model is None:
        return TokenWorks.none(first.size)
    # As complex numbers, pairs are sorted and compared at once.
    pairs, indexes = np.unique(first + 1j * second, return_inverse=True)
    known = [work(int(pair.real), int(pair.imag)) for pair in pairs.tolist()]
    flops = np.array([each.flops for each in known], dtype=np.float64)
    moved = np.array([each.bytes_moved for each in known], dtype=np.float64)
    return TokenWorks(np.zeros(first.size), flops[indexes], moved[indexes])


class PhaseWork(NamedTuple):
    """The work of many requests by phase, and their output tokens with the first of each.

    `computed` is the part of `prefill` without what cached tokens add.
    """

    prefill: TokenWork
    computed: TokenWork
    decode: TokenWork
    output_tokens: float


def seen_work(works: RequestWorks) -> PhaseWork:
    """The sum over all requests with a row."""
    return PhaseWork(
        works.prefill.total(),
        works.computed.total(),
        works.decode.total(),
        float(works.output_tokens.sum()),
    )


# Differences of shared-out counts below this are rounding errors.
_ROUNDING = 1e-6


class UnseenTokens(NamedTuple):
    """Tokens that the engine counted beyond those of requests with a row.

    `first` are the part of `output` that prefill computed; None if the engine does not count it.
    """

    computed: float
    output: float
    first: float | None


def unseen_tokens(observed: EngineObservation, active: Activities) -> UnseenTokens:
    """The unseen tokens of the observed time; 0 if the engine does not count."""
    time, increase = observed.time, observed.increase
    prompts = observed.as_counted(active, fact.INPUT_TOKENS)
    outputs = observed.as_counted(active, fact.OUTPUT_TOKENS)
    first = float(active.first_in(time).sum())
    return UnseenTokens(
        _beyond(increase.computed_tokens, float(prompts.input_counted_in(time).sum())),
        _beyond(increase.output_tokens, float(outputs.output_in(time).sum())),
        None if increase.first_tokens is None else _beyond(increase.first_tokens, first),
    )


def _beyond(counted: float | None, seen: float) -> float:
    more = (counted or 0.0) - seen
    return more if more > _ROUNDING else 0.0


def unseen_work(seen: PhaseWork, unseen: UnseenTokens, serving: Serving) -> PhaseWork:
    """The work of the unseen tokens: as that of the rows' tokens, or without context.

    Nothing is known of the cached tokens of unseen prompts.
    """
    prefill = decode = TokenWork()
    if serving.role is not Role.DECODE:
        computed = seen.computed
        prefill = _alike(unseen.computed, computed, computed.tokens, serving.prefill(1, 0))
    if serving.role is not Role.PREFILL:
        alone, decoded, of_rows = serving.decode(0, 2), unseen.output, seen.output_tokens
        if unseen.first is not None:
            decoded, of_rows = max(unseen.output - unseen.first, 0.0), seen.decode.tokens
        decode = _alike(decoded, seen.decode, of_rows, alone)
    return PhaseWork(prefill, prefill, decode, unseen.output)


def _alike(tokens: float, seen: TokenWork, seen_tokens: float, alone: Work) -> TokenWork:
    if seen.tokens > _ROUNDING:
        return seen.times(tokens / seen_tokens)
    return TokenWork(1.0, alone.flops, alone.bytes_moved).times(tokens)


def count_steps(observed: EngineObservation, works: RequestWorks, decode_tokens: float) -> Steps:
    """The engine's steps in the observed time, as it counted them or else estimated.

    The estimate for decode is the output tokens over the mean number of requests that decoded at
    once. For prefill it is one step per prompt, for the share of busy time without any decode.
    `decode_tokens` are those of all requests, also of those without a row.
    """
    if observed.increase.steps is not None:
        decode = min(observed.increase.steps, decode_tokens)
        return Steps(
            prefill=observed.increase.steps - decode, decode=decode, source=StepSource.COUNTED
        )
    time, active = observed.time, works.active
    decoding = active.decode.chosen(works.decodes)
    decoding_s, together_s = covered_s(decoding, time), float(decoding.within_s(time).sum())
    working_s = covered_s(active.whole, time)
    prompts = float(active.prefill.share_in(time).sum())
    return Steps(
        prefill=prompts * (1 - decoding_s / working_s) if working_s else prompts,
        decode=decode_tokens * decoding_s / together_s if together_s else decode_tokens,
        source=StepSource.ESTIMATED,
    )
