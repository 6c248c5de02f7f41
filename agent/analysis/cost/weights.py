"""Who pays for a second of the GPUs: the prices of the work of requests that run together."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent.analysis.cost.phases import Loads
from agent.analysis.efficiency.serving import Serving
from agent.records.columns import Array

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
    """Prices of one token, FLOP and byte of a step."""

    token: Array
    flop: Array
    byte: Array


@dataclass(frozen=True, slots=True)
class Pricing:
    """Prices of the work of one engine."""

    serving: Serving

    @property
    def method(self) -> Method:
        """By roofline where GPUs and model are known, else by tokens."""
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
    """The quotient; 0 where nothing is divided by."""
    found: Array = np.divide(part, whole, out=np.zeros(whole.shape), where=whole > _NOTHING)
    return found
