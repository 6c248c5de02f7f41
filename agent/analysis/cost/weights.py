"""Who pays for a second of the GPUs: what requests do in it, and the prices of that work."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent.analysis.efficiency.busy_time import FREE_TOKENS
from agent.analysis.efficiency.request_activity import EVER, TimeRanges, covered_s
from agent.analysis.efficiency.work import RequestWorks, Serving, TokenWorks
from agent.analysis.physics import Roof
from agent.records.columns import Array, Integers

# How long prefill takes, in seconds.
PrefillSeconds = Callable[[TokenWorks], Array]

# The part of their roofline that GPUs reach in prefill if no engine timed it, and the least part
# that is believed.
_EFFICIENCY, _LEAST_EFFICIENCY = 0.5, 0.2


class Loads(NamedTuple):
    """What phases do in one second of their time; each column has a value for each phase.

    Of prefill: how many prompts there are, their tokens, FLOPs and bytes of KV cache, the part of a
    prompt that is done, and the seconds of the GPUs that it takes, 0 if that is unknown. Of
    decode: streams, their tokens, and the FLOPs and bytes of KV cache of one step.
    """

    prompts: Array
    prompt_tokens: Array
    prompt_flops: Array
    prompt_bytes: Array
    prompt_parts: Array
    prompt_s: Array
    streams: Array
    stream_tokens: Array
    step_flops: Array
    step_bytes: Array

    @classmethod
    def of(cls, columns: Array) -> "Loads":
        """From an array with a row for each column."""
        return cls(*columns)


# The first columns, which are of prompts.
PROMPT_LOADS = Loads._fields.index("streams")


@dataclass(frozen=True, slots=True, eq=False)
class Phases:
    """All phases of some requests: `owners` are indices into the list of requests.

    `loads` has a row for each column of Loads. `cached_flops` and `cached_bytes` are the part of
    each prefill that its cached tokens add.
    """

    owners: Integers
    begins: Array
    ends: Array
    loads: Array
    cached_flops: Array
    cached_bytes: Array


def phases(works: RequestWorks, seconds: PrefillSeconds) -> Phases:
    """The phases with known work of requests, from the whole work of each."""
    prefills, decodes = np.flatnonzero(works.prefills), np.flatnonzero(works.decodes)
    times = [works.prefill_time.chosen(prefills), works.decode_time.chosen(decodes)]
    from_at, until = (np.concatenate(each) for each in zip(*times, strict=True))
    loads = np.zeros((len(Loads._fields), from_at.size))
    loads[:PROMPT_LOADS, : prefills.size] = _prompts(works.chosen(prefills), times[0], seconds)
    loads[PROMPT_LOADS:, prefills.size :] = _streams(works.chosen(decodes), times[1])
    cached = works.cached.chosen(prefills).times(1.0 / times[0].length_s)
    return Phases(
        owners=np.concatenate([prefills, decodes]),
        begins=from_at,
        ends=until,
        loads=loads,
        cached_flops=np.append(cached.flops, np.zeros(decodes.size)),
        cached_bytes=np.append(cached.kv_bytes, np.zeros(decodes.size)),
    )


def _prompts(works: RequestWorks, time: TimeRanges, seconds: PrefillSeconds) -> Array:
    """What prefills do in a second, in the order of Loads."""
    whole = works.prefill
    done = np.ones_like(time.from_at)
    return np.stack([done, *(each / time.length_s for each in (*whole, done, seconds(whole)))])


def _streams(works: RequestWorks, time: TimeRanges) -> Array:
    """What decodes do in a second, in the order of Loads."""
    streams, decode = works.active.choices, works.decode
    step = decode.times(streams / decode.tokens)
    return np.stack([streams, decode.tokens / time.length_s, step.flops, step.kv_bytes])


def prefill_seconds(works: RequestWorks, serving: Serving) -> PrefillSeconds:
    """How long prefill takes here, by the prompts that the engine timed.

    In proportion to the roofline, or to the tokens if GPUs or model are unknown; then 0 without
    a timed prompt. A short timed prompt shows only how long a step takes at least.
    """
    roof = serving.roof
    timed = works.chosen(works.active.timed)
    if roof is None:
        longest = _longest(timed, timed.prefill.tokens)
        tokens = float(np.maximum(longest.prefill.tokens, FREE_TOKENS).sum())
        each_s = covered_s(longest.active.prefill, EVER) / tokens if tokens else 0.0
        return lambda work: work.tokens * each_s
    longest = _longest(timed, timed.prefill.flops)
    weights = serving.weight_bytes(1.0, 1.0)
    least_s = float(_least_s(roof, longest.prefill, weights).sum())
    whole_s = covered_s(longest.active.prefill, EVER)
    reached = min(max(least_s / whole_s, _LEAST_EFFICIENCY), 1.0) if whole_s else _EFFICIENCY
    return lambda work: _least_s(roof, work) / reached


def _least_s(roof: Roof, work: TokenWorks, more_bytes: float = 0.0) -> Array:
    moved = work.kv_bytes + more_bytes
    found: Array = np.maximum(work.flops / roof.flops_per_s, moved / roof.bytes_per_s)
    return found


def _longest(works: RequestWorks, sizes: Array) -> RequestWorks:
    """Those at least half as large as the largest: small prompts take a whole step too."""
    return works.chosen(sizes >= sizes.max(initial=0.0) / 2)


# Without a model: how many prompt tokens take as long as one output token. A decoded token reads
# the weights together with its batch; a prompt token is computed among hundreds. Price lists of
# hosted models have 3 to 5 too.
OUTPUT_TOKEN_WEIGHT = 4.0
# The most tokens of a step (vLLM's default `max_num_batched_tokens` for its server on large GPUs).
# A longer prompt takes several steps, and every one of them decodes.
STEP_TOKENS = 8192.0
# No load is as small as this.
_NOTHING = 1e-30
# Numbers of tokens in a step, at which the bytes of weights are computed.
_TOKENS = 2.0 ** np.arange(-10, 18)


class Method(StrEnum):
    """How work was weighed."""

    ROOFLINE = "roofline"
    TOKENS = "tokens"


class Prices(NamedTuple):
    """Shares of the time for each unit of a load; each column has a value for each segment."""

    prompt_token: Array
    prompt_flop: Array
    prompt_byte: Array
    stream: Array
    step_flop: Array
    step_byte: Array

    def of(self, loads: Loads) -> Array:
        """What these loads pay."""
        return self.of_prompts(loads) + self.of_streams(loads)

    def of_prompts(self, loads: Loads) -> Array:
        """What prefill pays."""
        tokens = self.prompt_token * loads.prompt_tokens
        work = self.prompt_flop * loads.prompt_flops + self.prompt_byte * loads.prompt_bytes
        return tokens + work

    def of_streams(self, loads: Loads) -> Array:
        """What decode pays."""
        work = self.step_flop * loads.step_flops + self.step_byte * loads.step_bytes
        return self.stream * loads.streams + work


class _Shared(NamedTuple):
    token: Array
    flop: Array
    byte: Array


@dataclass(frozen=True, slots=True)
class Pricing:
    """Prices of the work of one engine."""

    serving: Serving

    @property
    def method(self) -> Method:
        """By roofline if GPUs and model are known, else by tokens."""
        return Method.TOKENS if self.serving.roof is None else Method.ROOFLINE

    def prices(self, loads: Loads) -> Prices:
        """The prices at which all loads of a segment together pay its time.

        Prices of a segment without load are 0.

        While a prompt is computed, its chunks and a token of every stream share steps. The rest of
        the time belongs to steps that only decode.
        """
        steps = self._prefilling_steps(loads)
        share = self._prefilling_share(loads)
        tokens = loads.prompt_tokens + steps * loads.streams
        mixed = self._shared(
            tokens,
            loads.prompt_flops + steps * loads.step_flops,
            loads.prompt_bytes + steps * loads.step_bytes,
            steps * self._weight_bytes(_over(tokens, steps)),
        )
        decoding = self._shared(
            loads.streams, loads.step_flops, loads.step_bytes, self._weight_bytes(loads.streams)
        )
        of_streams = [
            share * steps * both + (1 - share) * alone
            for both, alone in zip(mixed, decoding, strict=True)
        ]
        return Prices(*[share * each for each in mixed], *of_streams)

    def _prefilling_steps(self, loads: Loads) -> Array:
        """Steps that compute prompts, in a second."""
        whole = _over(loads.prompt_parts, loads.prompts)
        steps = np.maximum(loads.prompt_tokens / STEP_TOKENS, whole)
        rate = _over(loads.stream_tokens, loads.streams)
        return np.where(rate > 0, np.minimum(steps, rate), steps)

    def _prefilling_share(self, loads: Loads) -> Array:
        """The share of the time in which prompts are computed.

        A prompt takes a step, and the time that the GPUs need for it. It may also have waited in
        its prefill: only its first token shows its end.
        """
        ranks = self.serving.parallelism.data
        alone = _over(loads.prompt_parts, loads.prompts) * np.minimum(loads.prompts, ranks) / ranks
        one_step = alone * _over(loads.streams, loads.stream_tokens)
        # Of prompts whose prefill was never timed, only the tokens are known.
        weighed = loads.prompt_tokens + OUTPUT_TOKEN_WEIGHT * loads.stream_tokens
        untimed = _over(loads.prompt_tokens, weighed)
        prefill_s = np.where(loads.prompt_s > 0, loads.prompt_s, untimed)
        busy = np.minimum(one_step + prefill_s, 1.0)
        works = (loads.prompt_tokens > 0) | (loads.prompt_flops > 0)
        return np.where(works, np.where(loads.streams > 0, busy, 1.0), 0.0)

    def _shared(self, tokens: Array, flops: Array, moved: Array, weights: Array) -> _Shared:
        """Prices by the roof that bounds the work: all tokens share the weights evenly."""
        roof = self.serving.roof
        if roof is None:
            return _Shared(_over(np.ones_like(tokens), tokens), 0 * tokens, 0 * tokens)
        moved = moved + weights
        computing = flops / roof.flops_per_s >= moved / roof.bytes_per_s
        flop, byte = _over(1.0 * computing, flops), _over(1.0 * ~computing, moved)
        return _Shared(_over(byte * weights, tokens), flop, byte)

    def _weight_bytes(self, tokens: Array) -> Array:
        """Bytes of weights that one step of all ranks reads for each number of tokens."""
        if self.serving.roof is None:
            return 0 * tokens
        ranks = self.serving.parallelism.data
        read = [self.serving.weight_bytes(min(each, ranks), each) for each in _TOKENS.tolist()]
        found: Array = np.interp(tokens, _TOKENS, read)
        return found


def _over(part: NDArray[Any], whole: NDArray[Any]) -> Array:
    """The quotient; 0 if nothing is divided by."""
    found: Array = np.divide(part, whole, out=np.zeros(whole.shape), where=whole > _NOTHING)
    return found
