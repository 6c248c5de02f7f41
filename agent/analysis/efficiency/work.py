"""The work that requests were to an engine in a window, prefill and decode apart."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import fsum
from typing import NamedTuple

from agent.analysis.efficiency.observation import Observation
from agent.analysis.efficiency.request_activity import RequestActivity
from agent.analysis.efficiency.serving import Role, Serving
from agent.analysis.efficiency.time_range import TimeRange, covered_s
from agent.records.model import Work


class TokenWork(NamedTuple):
    """Tokens, and their FLOPs and bytes of KV cache; those are 0 where the model is unknown."""

    tokens: float = 0.0
    flops: float = 0.0
    kv_bytes: float = 0.0

    def times(self, factor: float) -> "TokenWork":
        """So many times this load."""
        return TokenWork(*[value * factor for value in self])

    def plus(self, other: "TokenWork") -> "TokenWork":
        """Both together."""
        return TokenWork(*[mine + yours for mine, yours in zip(self, other, strict=True)])


class RequestWork(NamedTuple):
    """One request's part of a window. `computed` and `cached` together are its prefill.

    `cached` is what the cached part of its prompt adds: scores over it, and reading it, of tokens
    that are counted in `cached_tokens` since none is computed. The tokens of `decode` leave out
    the first output token of each choice, which prefill brings; `output_tokens` do not.
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


class StepSource(StrEnum):
    """Where a number of steps comes from."""

    COUNTED = "counted by the engine"
    ESTIMATED = "estimated from the requests, a token of each to a step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps of single ranks, each once: one that decodes is `decode`, also where it prefills."""

    prefill: float
    decode: float
    source: StepSource


def requests_work(
    active: Iterable[RequestActivity], serving: Serving, window: TimeRange
) -> list[RequestWork]:
    """The parts of these requests that fall into the window; requests outside are left out."""
    found = []
    for activity in active:
        in_prefill = activity.prefill.share_in(window)
        in_decode = activity.decode.share_in(window)
        if in_prefill or in_decode:
            found.append(_request_load(activity, serving, window, (in_prefill, in_decode)))
    return found


def _request_load(
    activity: RequestActivity, serving: Serving, window: TimeRange, shares: tuple[float, float]
) -> RequestWork:
    in_prefill, in_decode = shares
    computed, cached = TokenWork(), TokenWork()
    if in_prefill and serving.role is not Role.DECODE:
        computed, cached = _prefill_loads(activity, serving)
    decode = TokenWork()
    if in_decode and serving.role is not Role.PREFILL:
        decode = _decode_load(activity, serving)
    return RequestWork(
        activity,
        computed.times(in_prefill),
        cached.times(in_prefill),
        decode.times(in_decode),
        activity.cached_tokens * in_prefill,
        activity.output_in(window),
    )


def _prefill_loads(activity: RequestActivity, serving: Serving) -> tuple[TokenWork, TokenWork]:
    """A whole prefill: what its computed tokens would take alone, and what the cached ones add."""
    new, cached = activity.computed_tokens, activity.cached_tokens
    if new + cached == 0:
        return TokenWork(), TokenWork()
    whole = serving.prefill(new, cached)
    alone = serving.prefill(new, 0) if new else Work(0.0, 0.0)
    return (
        TokenWork(new, alone.flops, alone.bytes_moved),
        TokenWork(0.0, whole.flops - alone.flops, whole.bytes_moved - alone.bytes_moved),
    )


def _decode_load(activity: RequestActivity, serving: Serving) -> TokenWork:
    work = decode_work(activity, serving)
    return TokenWork(activity.decoded_tokens, work.flops, work.bytes_moved)


def prefill_work(activity: RequestActivity, serving: Serving) -> Work:
    """The whole prefill; none by an engine that does not do this phase."""
    if serving.role is Role.DECODE:
        return Work(0.0, 0.0)
    return serving.prefill(activity.computed_tokens, activity.cached_tokens)


def decode_work(activity: RequestActivity, serving: Serving) -> Work:
    """The whole decode: each choice goes on from the prompt, with an equal part of the tokens.

    None by an engine that does not do this phase.
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
    """Loads of many requests together, and their output tokens with the first of each."""

    prefill: TokenWork
    decode: TokenWork
    output_tokens: float


def seen_work(loads: Sequence[RequestWork]) -> PhaseWork:
    """The sums over all requests with a row, whatever their order."""
    return PhaseWork(
        _sum([load.prefill for load in loads]),
        _sum([load.decode for load in loads]),
        fsum(load.output_tokens for load in loads),
    )


def _sum(parts: Sequence[TokenWork]) -> TokenWork:
    return TokenWork(*[fsum(values) for values in zip(TokenWork(), *parts, strict=True)])


# Shares of counts leave so much behind of a difference that is none.
_ROUNDING = 1e-6


class UnseenTokens(NamedTuple):
    """Tokens that the engine counted in a window beyond those of the requests with a row."""

    computed: float
    output: float


def unseen_tokens(observed: Observation, active: Sequence[RequestActivity]) -> UnseenTokens:
    """None are unseen where the engine does not count."""
    window, growth = observed.window, observed.growth
    computed = fsum(activity.input_told_in(window) for activity in active)
    output = fsum(activity.output_in(window) for activity in active)
    return UnseenTokens(
        _beyond(growth.computed_tokens, computed), _beyond(growth.output_tokens, output)
    )


def _beyond(counted: float | None, seen: float) -> float:
    more = (counted or 0.0) - seen
    return more if more > _ROUNDING else 0.0


def unseen_work(seen: PhaseWork, unseen: UnseenTokens, serving: Serving) -> PhaseWork:
    """The unseen tokens as load: like those of the rows, without context where there are none."""
    prefill = decode = TokenWork()
    if serving.role is not Role.DECODE:
        prefill = _alike(unseen.computed, seen.prefill, seen.prefill.tokens, serving.prefill(1, 0))
    if serving.role is not Role.PREFILL:
        decode = _alike(unseen.output, seen.decode, seen.output_tokens, serving.decode(0, 2))
    return PhaseWork(prefill, decode, unseen.output)


def _alike(tokens: float, seen: TokenWork, seen_tokens: float, alone: Work) -> TokenWork:
    if seen.tokens > _ROUNDING:
        return seen.times(tokens / seen_tokens)
    return TokenWork(1.0, alone.flops, alone.bytes_moved).times(tokens)


def count_steps(observed: Observation, loads: Sequence[RequestWork], decode_tokens: float) -> Steps:
    """The engine's steps in the window: as it counted them, else estimated.

    An estimate divides the output tokens by how many requests decoded at once, and takes a step for
    each prompt for as much of the time as nothing decoded. `decode_tokens` are those of all
    requests, also of ones that have no row.
    """
    if observed.growth.steps is not None:
        decode = min(observed.growth.steps, decode_tokens)
        return Steps(
            prefill=observed.growth.steps - decode, decode=decode, source=StepSource.COUNTED
        )
    window = observed.window
    decoding = [load.activity.decode for load in loads if load.decode.tokens]
    decoding_s = covered_s(decoding, window)
    together_s = fsum(interval.within(window).length_s for interval in decoding)
    working_s = covered_s((load.activity.whole for load in loads), window)
    prompts = fsum(load.activity.prefill.share_in(window) for load in loads)
    return Steps(
        prefill=prompts * (1 - decoding_s / working_s) if working_s else prompts,
        decode=decode_tokens * decoding_s / together_s if together_s else decode_tokens,
        source=StepSource.ESTIMATED,
    )
