"""Single steps that took many times as long as their tokens and the steps around them explain."""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from agent.analysis.causes.activity import Slice
from agent.analysis.causes.step_costs import ComputedWork, Costs, beyond_free

# A step stands out if it took this many times the expected time, and so much longer.
_TIMES, _LONGER_S = 3.0, 0.1
# Steps that are slow for long do not stand out among each other.
_NEAR = 15
_MOST = 1_024


class Stall(NamedTuple):
    """A step that stood out (Unix seconds). Without stall it would have taken `usual_s`."""

    since: float
    until: float
    usual_s: float

    @property
    def lost_s(self) -> float:
        """How much longer the step took."""
        return self.until - self.since - self.usual_s


class Stalls:
    """The steps of one engine that stood out."""

    def __init__(self) -> None:
        self._stalls: list[Stall] = []
        # How many times the expected time the newest steps took.
        self._times: deque[float] = deque(maxlen=_NEAR)

    @property
    def until(self) -> float:
        """The end of the newest; minus infinity without any."""
        return self._stalls[-1].until if self._stalls else float("-inf")

    def add(self, done: Slice, costs: Costs | None, budget: float | None) -> None:
        """Add a step; `costs` are what steps usually take, `budget` its most tokens."""
        if costs is None or not done.busy_s:
            return
        prompts = done.prefill_tokens > 0
        tokens = done.prefill_tokens
        large = beyond_free(tokens, budget)
        work = ComputedWork(
            1, done.decode_tokens, tokens, prompts, large, done.products, done.busy_s
        )
        expected_s = costs.of(work)
        if expected_s <= 0:
            return
        if done.busy_s >= _LONGER_S and len(self._times) == _NEAR:
            usual_s = expected_s * max(1.0, median(self._times))
            stall = Stall(done.until - done.busy_s, done.until, usual_s)
            if stands_out(stall):
                insort(self._stalls, stall)
                del self._stalls[:-_MOST]
        self._times.append(done.busy_s / expected_s)

    def between(self, start: float, end: float) -> Iterator[Stall]:
        """Those that overlap a period, the newest first."""
        for stall in reversed(self._stalls):
            if stall.until <= start:
                return
            if stall.since < end:
                yield stall


def stands_out(step: Stall) -> bool:
    """Whether a step took much longer than usual."""
    return step.until - step.since >= _TIMES * step.usual_s and step.lost_s >= _LONGER_S
