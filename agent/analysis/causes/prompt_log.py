"""The prompts that an engine prefilled lately, in the order of their first tokens."""

from bisect import bisect_left, bisect_right
from heapq import nlargest
from typing import NamedTuple

from agent.analysis.causes.periods import Prompts

# A minute of the busiest engine.
_MAX_PROMPTS = 16_384
# Prompts that began in a period end at most this long after it; of more, the first are looked at.
_LONG_PREFILL_S = 1.0
_MOST_PROMPTS = 256
_NAMED_PROMPTS = 3


class _Prompt(NamedTuple):
    """A prompt: when its prefill began and ended, and its computed tokens."""

    began_at: float
    first_at: float
    tokens: int
    span_id: str


class PromptLog:
    """Prompts by the time of their first token; the oldest of too many go."""

    def __init__(self) -> None:
        self._at: list[float] = []
        self._prompts: list[_Prompt] = []

    def add(self, first_at: float, prefill_s: float, tokens: int, span_id: str) -> None:
        """Add a prompt with its computed tokens."""
        index = bisect_right(self._at, first_at)
        self._at.insert(index, first_at)
        self._prompts.insert(index, _Prompt(first_at - prefill_s, first_at, tokens, span_id))
        if len(self._at) > 2 * _MAX_PROMPTS:
            del self._at[:-_MAX_PROMPTS], self._prompts[:-_MAX_PROMPTS]

    def within(self, start: float, end: float, span_id: str) -> Prompts:
        """The prompts of the requests but one that were prefilled at some time of a period.

        A prompt that was prefilled before or after it, too, counts by the part within.
        """
        low = bisect_left(self._at, start)
        high = bisect_right(self._at, end + _LONG_PREFILL_S)
        count, tokens, sizes = 0, 0.0, []
        for prompt in self._prompts[low : min(high, low + _MOST_PROMPTS)]:
            if prompt.began_at < end and prompt.span_id != span_id:
                within_s = min(prompt.first_at, end) - max(prompt.began_at, start)
                took_s = prompt.first_at - prompt.began_at
                count += 1
                tokens += prompt.tokens * (within_s / took_s if took_s > 0 else 1.0)
                sizes.append(prompt.tokens)
        return Prompts(count, round(tokens), tuple(nlargest(_NAMED_PROMPTS, sizes)))
