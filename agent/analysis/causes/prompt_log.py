"""The prompts that an engine prefilled lately, in the order of their first tokens."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from agent.analysis.causes.periods import Prompts

# A minute of the busiest engine.
_MAX_PROMPTS = 16_384
# Prompts that began in a period end at most this long after it.
_LONG_PREFILL_S = 1.0
# So few are looked at one by one, for the part of each in the period.
_FEW = 16
# The largest prompts of so many are named.
_LOOKED_AT = 256
_NAMED = 3


class PromptLog:
    """Prompts by the time of their first token; the oldest of too many go."""

    def __init__(self) -> None:
        self._at: list[float] = []
        self._took_s: list[float] = []
        self._tokens: list[int] = []
        self._missed: list[int | None] = []

    def add(
        self, first_at: float, prefill_s: float, tokens: int, missed: int | None = None
    ) -> None:
        """Add a prompt with its computed tokens.

        `missed` of them the prefix cache usually has; None where nobody tells.
        """
        index = bisect_right(self._at, first_at)
        self._at.insert(index, first_at)
        self._took_s.insert(index, prefill_s)
        self._tokens.insert(index, tokens)
        self._missed.insert(index, missed)
        if len(self._at) > 2 * _MAX_PROMPTS:
            for column in (self._at, self._took_s, self._tokens, self._missed):
                del column[:-_MAX_PROMPTS]

    def within(self, start: float, end: float, own: tuple[float, int]) -> Prompts:
        """The prompts that were prefilled in a period, but for the request's own.

        `own` is the time of its first token, and its computed tokens. Of few prompts, those that
        were also prefilled before or after the period count by their part within it; of many, all
        whose prefill ended in it count.
        """
        low, high = bisect_left(self._at, start), bisect_right(self._at, end)
        if high - low <= _FEW:
            return self._one_by_one(low, (start, end), own)
        tokens = self._tokens[low:high]
        has_own = start <= own[0] <= end and own[1] in tokens
        count, total = len(tokens), sum(tokens)
        largest = _largest(tokens[-_LOOKED_AT:])
        if has_own:
            count, total = count - 1, total - own[1]
        return Prompts(count, total, largest)

    def missed_share(self, start: float, end: float) -> float | None:
        """The part of the computed tokens that the cache usually has; None where nobody tells.

        By the newest of the prompts whose prefill ended in the period.
        """
        high = bisect_right(self._at, end)
        low = max(bisect_left(self._at, start), high - _LOOKED_AT)
        missed = [tokens for tokens in self._missed[low:high] if tokens is not None]
        if not missed or len(missed) < high - low:
            return None
        return sum(missed) / max(1, sum(self._tokens[low:high]))

    def _one_by_one(self, low: int, period: tuple[float, float], own: tuple[float, int]) -> Prompts:
        start, end = period
        high = bisect_right(self._at, end + _LONG_PREFILL_S, lo=low)
        sizes: list[int] = []
        total = 0.0
        for index in range(low, min(high, low + 2 * _FEW)):
            first_at, took_s, tokens = self._at[index], self._took_s[index], self._tokens[index]
            began_at = first_at - took_s
            if began_at >= end or (abs(first_at - own[0]) < 1e-6 and tokens == own[1]):
                continue
            within_s = min(first_at, end) - max(began_at, start)
            total += tokens * (within_s / took_s if took_s > 0 else 1.0)
            sizes.append(tokens)
        return Prompts(len(sizes), round(total), _largest(sizes))


def _largest(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(sizes, reverse=True)[:_NAMED])
