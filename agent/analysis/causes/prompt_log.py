"""The prompts that an engine prefilled lately, in the order of their first tokens."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from agent.analysis.causes.periods import Prompts

# The prompts of a minute of the busiest engine.
_MAX_PROMPTS = 16_384
# A prompt that began in a period is looked for up to this long after it.
_LONG_PREFILL_S = 1.0
# Up to this many prompts in a period, each counts with the part of its prefill in the period.
_FEW = 16
# Two times of a first token differ by no more than rounding.
_SAME_S = 1e-6


class Prompt(NamedTuple):
    """A prompt: the Unix time of its first token, its prefill in seconds, its computed tokens.

    `missing` is how many of these tokens the prefix cache usually has; None where that is unknown.
    """

    span_id: str
    first_at: float
    prefill_s: float
    tokens: int
    missing: int | None = None


class PromptLog:
    """Prompts by the time of their first token, the newest _MAX_PROMPTS at least."""

    def __init__(self) -> None:
        self._at = array("d")
        self._prompts: list[Prompt] = []
        self._sums = _PromptSums()

    def add(self, prompt: Prompt) -> None:
        """Add a prompt, in any order of time."""
        index = bisect_right(self._at, prompt.first_at)
        self._at.insert(index, prompt.first_at)
        self._prompts.insert(index, prompt)
        self._sums.cut(index)
        if len(self._at) > 2 * _MAX_PROMPTS:
            del self._at[:-_MAX_PROMPTS]
            del self._prompts[:-_MAX_PROMPTS]
            self._sums.cut(0)

    def within(self, start: float, end: float, own: tuple[str, float]) -> Prompts:
        """The prompts that were prefilled in a period (Unix time), except the request's own.

        `own` is the span id of the request and the time of its first token. Of few prompts, each
        counts with the part of its prefill in the period. Of many, each whose prefill ended in the
        period counts whole.
        """
        low, high = bisect_left(self._at, start), bisect_right(self._at, end)
        mine = self._place(*own)
        if high - low <= _FEW:
            return self._one_by_one(low, (start, end), mine)
        self._sums.extend(self._prompts)
        tokens, missing, unknown = self._sums.between(low, high)
        many, own_tokens = high - low, 0
        if low <= mine < high:
            prompt = self._prompts[mine]
            many, own_tokens = many - 1, prompt.tokens
            tokens -= own_tokens
            missing -= prompt.missing or 0
            unknown -= prompt.missing is None
        share = None if unknown else missing / max(1, tokens)
        return Prompts(many, tokens, share, self._sums.sizes[low:high], own_tokens)

    def _place(self, span_id: str, first_at: float) -> int:
        """The place of a request's own prompt; -1 without one."""
        times = self._at
        index = bisect_left(times, first_at - _SAME_S)
        while index < len(times) and times[index] <= first_at + _SAME_S:
            if self._prompts[index].span_id == span_id:
                return index
            index += 1
        return -1

    def _one_by_one(self, low: int, period: tuple[float, float], mine: int) -> Prompts:
        start, end = period
        high = bisect_right(self._at, end + _LONG_PREFILL_S, lo=low)
        sizes: list[int] = []
        within: list[float] = []
        missing: list[float | None] = []
        for index in range(low, min(high, low + 2 * _FEW)):
            _, first_at, took_s, tokens, lost = self._prompts[index]
            began_at = first_at - took_s
            if began_at >= end or index == mine:
                continue
            within_s = min(first_at, end) - max(began_at, start)
            part = within_s / took_s if took_s > 0 else 1.0
            sizes.append(tokens)
            within.append(tokens * part)
            missing.append(None if lost is None else lost * part)
        share = _missing_share(within, missing)
        return Prompts(len(sizes), round(sum(within)), share, sizes)


class _PromptSums:
    """Running sums over the prompts in their order, computed when they are needed."""

    def __init__(self) -> None:
        # 32 bits are enough for a prompt, and quicker to sort for the evidence.
        self.sizes = np.zeros(2 * _MAX_PROMPTS + 1, np.int32)
        self._tokens = array("q", [0])
        self._missing = array("q", [0])
        self._unknown = array("q", [0])

    def cut(self, index: int) -> None:
        """Drop the sums from this place on: a prompt was inserted there."""
        for sums in (self._tokens, self._missing, self._unknown):
            del sums[index + 1 :]

    def extend(self, prompts: Sequence[Prompt]) -> None:
        """Make the sums up to the newest prompt."""
        known = len(self._tokens) - 1
        if known < len(prompts):
            added = prompts[known:]
            self.sizes[known : len(prompts)] = [prompt.tokens for prompt in added]
            _sum_up(self._tokens, (prompt.tokens for prompt in added))
            _sum_up(self._missing, (prompt.missing or 0 for prompt in added))
            _sum_up(self._unknown, (prompt.missing is None for prompt in added))

    def between(self, low: int, high: int) -> tuple[int, int, int]:
        """Of some prompts the computed and missing tokens, and how many have unknown ones."""
        return (
            self._tokens[high] - self._tokens[low],
            self._missing[high] - self._missing[low],
            self._unknown[high] - self._unknown[low],
        )


def _sum_up(sums: "array[int]", values: Iterable[int]) -> None:
    sums.extend(accumulate(values, initial=sums.pop()))


def _missing_share(tokens: Sequence[float], missing: Sequence[float | None]) -> float | None:
    known = [each for each in missing if each is not None]
    if not known or len(known) < len(missing):
        return None
    return sum(known) / max(1.0, sum(tokens))
