"""The work that requests were to an engine in some time, prefill and decode apart."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import fsum
from typing import NamedTuple

from agent.analysis.efficiency.engine_observation import EngineObservation
from agent.analysis.efficiency.request_activity import RequestActivity
from agent.analysis.efficiency.serving import Role, Serving
from agent.analysis.efficiency.time_range import TimeRange, covered_s
from agent.records.model import Work


class TokenWork(NamedTuple):
    """Tokens with their FLOPs and bytes of KV cache, which are 0 where the model is unknown."""

    tokens: float = 0.0
    flops: float = 0.0
    kv_bytes: float = 0.0

    def times(self, factor: float) -> "TokenWork":
        """This work, so many times."""
        return TokenWork(*[value * factor for value in self])

    def plus(self, other: "TokenWork") -> "TokenWork":
        """The sum of both."""
        return TokenWork(*[mine + yours for mine, yours in zip(self, other, strict=True)])


class RequestWork(NamedTuple):
    """One request's work, or the part of it that lies in some time.

    `computed` and `cached` together are its prefill. `cached` is what the cached part of the prompt
    adds: reading it and the scores over it. Its tokens are 0, because none of them is computed;
    `cached_tokens` counts them. `decode` leaves out the first output token of each choice, which
    prefill computes; `output_tokens` has all of them.
    """

    activity: RequestActivity
    computed: TokenWork
    cached: TokenWork
    decode: TokenWork
    cached_tokens: float
    output_tokens: float

    @property
    def prefill(self) -> TokenWork:
        """All of its prefill."""
        return self.computed.plus(self.cached)

    @property
    def prefill_time(self) -> TimeRange:
        """When a whole request's prefill was: any time, where its end or any decode is unknown."""
        alone = not self.decode.tokens or not self.activity.prefill.length_s
        return _lasting(self.activity.whole if alone else self.activity.prefill)

    @property
    def decode_time(self) -> TimeRange:
        """When a whole request's decode was: any time, where no prefill is known."""
        alone = not (self.prefill.tokens or self.prefill.flops)
        return _lasting(self.activity.whole if alone else self.activity.decode)

    def part_in(self, time: TimeRange) -> "RequestWork | None":
        """The part in `time` of a whole request; None where it has none there."""
        in_prefill, in_decode = self.prefill_time.share_in(time), self.decode_time.share_in(time)
        if not (in_prefill or in_decode):
            return None
        return RequestWork(
            self.activity,
            self.computed.times(in_prefill),
            self.cached.times(in_prefill),
            self.decode.times(in_decode),
            self.cached_tokens * in_prefill,
            self.activity.first_in(time) + self.activity.decoded_tokens * in_decode,
        )


# A phase of no length has at least this one, so that its work is somewhere.
_SHORTEST_S = 1e-3


def _lasting(time: TimeRange) -> TimeRange:
    return TimeRange(time.from_at, max(time.until, time.from_at + _SHORTEST_S))


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


def whole_works(active: Iterable[RequestActivity], serving: Serving) -> list[RequestWork]:
    """The whole work of each request."""
    return [_whole_work(activity, serving) for activity in active]


def works_in(works: Iterable[RequestWork], time: TimeRange) -> list[RequestWork]:
    """The parts of the requests' work in `time`, without requests that have none there."""
    parts = (work.part_in(time) for work in works)
    return [part for part in parts if part is not None]


def _whole_work(activity: RequestActivity, serving: Serving) -> RequestWork:
    computed, cached = TokenWork(), TokenWork()
    if serving.role is not Role.DECODE:
        computed, cached = _prefill_parts(activity, serving)
    decode = TokenWork()
    if serving.role is not Role.PREFILL:
        whole = decode_work(activity, serving)
        decode = TokenWork(activity.decoded_tokens, whole.flops, whole.bytes_moved)
    return RequestWork(
        activity, computed, cached, decode, activity.cached_tokens, activity.output_tokens
    )


def _prefill_parts(activity: RequestActivity, serving: Serving) -> tuple[TokenWork, TokenWork]:
    """A whole prefill: its computed tokens as if alone, and what the cached ones add."""
    new, cached = activity.computed_tokens, activity.cached_tokens
    if new + cached == 0:
        return TokenWork(), TokenWork()
    whole = serving.prefill(new, cached)
    alone = serving.prefill(new, 0) if new else Work(0.0, 0.0)
    return (
        TokenWork(new, alone.flops, alone.bytes_moved),
        TokenWork(0.0, whole.flops - alone.flops, whole.bytes_moved - alone.bytes_moved),
    )


def prefill_work(activity: RequestActivity, serving: Serving) -> Work:
    """The whole prefill of a request; none on an engine that only decodes."""
    if serving.role is Role.DECODE:
        return Work(0.0, 0.0)
    return serving.prefill(activity.computed_tokens, activity.cached_tokens)


def decode_work(activity: RequestActivity, serving: Serving) -> Work:
    """The whole decode of a request; none on an engine that only prefills.

    Each choice continues the prompt with an equal part of the output tokens.
    """
    if serving.role is Role.PREFILL:
        return Work(0.0, 0.0)
    prompt = activity.computed_tokens + activity.cached_tokens
    each, over = divmod(activity.output_tokens, activity.choices)
    short, long = serving.decode(prompt, each), serving.decode(prompt, each + 1)
    fewer = activity.choices - over
    return Work(
        fewer * short.flops + over * long.flops,
        fewer * short.bytes_moved + over * long.bytes_moved,
    )


class PhaseWork(NamedTuple):
    """The work of many requests by phase, and their output tokens with the first of each.

    `computed` is the part of `prefill` without what cached tokens add.
    """

    prefill: TokenWork
    computed: TokenWork
    decode: TokenWork
    output_tokens: float


def seen_work(works: Sequence[RequestWork]) -> PhaseWork:
    """The sum over all requests with a row, in any order."""
    return PhaseWork(
        _sum([work.prefill for work in works]),
        _sum([work.computed for work in works]),
        _sum([work.decode for work in works]),
        fsum(work.output_tokens for work in works),
    )


def _sum(parts: Sequence[TokenWork]) -> TokenWork:
    return TokenWork(*[fsum(values) for values in zip(TokenWork(), *parts, strict=True)])


# Differences of shared-out counts below this are rounding errors.
_ROUNDING = 1e-6


class UnseenTokens(NamedTuple):
    """Tokens that the engine counted beyond those of requests with a row.

    `first` are the part of `output` that prefill computed; None where the engine does not count it.
    """

    computed: float
    output: float
    first: float | None


def unseen_tokens(observed: EngineObservation, active: Sequence[RequestActivity]) -> UnseenTokens:
    """The unseen tokens of the observed time; 0 where the engine does not count."""
    time, growth = observed.time, observed.growth
    computed = fsum(activity.input_counted_in(time) for activity in active)
    output = fsum(activity.output_in(time) for activity in active)
    first = fsum(activity.first_in(time) for activity in active)
    return UnseenTokens(
        _beyond(growth.computed_tokens, computed),
        _beyond(growth.output_tokens, output),
        None if growth.first_tokens is None else _beyond(growth.first_tokens, first),
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


def count_steps(
    observed: EngineObservation, works: Sequence[RequestWork], decode_tokens: float
) -> Steps:
    """The engine's steps in the observed time, as it counted them or else estimated.

    The estimate for decode is the output tokens over the mean number of requests that decoded at
    once. For prefill it is one step per prompt, for the share of busy time without any decode.
    `decode_tokens` are those of all requests, also of those without a row.
    """
    if observed.growth.steps is not None:
        decode = min(observed.growth.steps, decode_tokens)
        return Steps(
            prefill=observed.growth.steps - decode, decode=decode, source=StepSource.COUNTED
        )
    time = observed.time
    decoding = [work.activity.decode for work in works if work.decode.tokens]
    decoding_s = covered_s(decoding, time)
    together_s = fsum(each.within(time).length_s for each in decoding)
    working_s = covered_s((work.activity.whole for work in works), time)
    prompts = fsum(work.activity.prefill.share_in(time) for work in works)
    return Steps(
        prefill=prompts * (1 - decoding_s / working_s) if working_s else prompts,
        decode=decode_tokens * decoding_s / together_s if together_s else decode_tokens,
        source=StepSource.ESTIMATED,
    )
