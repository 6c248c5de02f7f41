"""Ranges of time, and how much of one lies inside another."""

from collections.abc import Iterable
from itertools import chain
from math import inf
from typing import NamedTuple

import numpy as np

from agent.records.columns import Array, Mask, Places


class TimeRange(NamedTuple):
    """A range of time in Unix seconds. `until` is not part of it."""

    from_at: float
    until: float

    @property
    def length_s(self) -> float:
        """Seconds, never negative."""
        return max(self.until - self.from_at, 0.0)

    def within(self, other: "TimeRange") -> "TimeRange":
        """The part of this range inside another; of no length if they do not meet."""
        from_at = max(self.from_at, other.from_at)
        return TimeRange(from_at, max(min(self.until, other.until), from_at))

    def share_in(self, other: "TimeRange") -> float:
        """The share of this range inside another; a range of no length is inside whole or not."""
        if self.until > self.from_at:
            return self.within(other).length_s / self.length_s
        return float(other.from_at <= self.from_at < other.until)

    def holds(self, times: Array) -> Mask:
        """Which of these times are in it."""
        return (self.from_at <= times) & (times < self.until)


EVER = TimeRange(-inf, inf)


class TimeRanges(NamedTuple):
    """Many ranges of time."""

    from_at: Array
    until: Array

    @classmethod
    def of(cls, ranges: Iterable[Iterable[float]]) -> "TimeRanges":
        """These ranges."""
        ends = np.fromiter(chain.from_iterable(ranges), dtype=np.float64)
        return cls(ends[::2], ends[1::2])

    def plus(self, time: TimeRange) -> "TimeRanges":
        """With one more."""
        return TimeRanges(*[np.append(*each) for each in zip(self, time, strict=True)])

    @property
    def length_s(self) -> Array:
        """Seconds of each, never negative."""
        found: Array = np.maximum(self.until - self.from_at, 0.0)
        return found

    def chosen(self, which: Mask | Places) -> "TimeRanges":
        """Some of them."""
        return TimeRanges(self.from_at[which], self.until[which])

    def within_s(self, time: TimeRange) -> Array:
        """Seconds of each inside a range."""
        begins, ends = np.maximum(self.from_at, time.from_at), np.minimum(self.until, time.until)
        found: Array = np.maximum(ends - begins, 0.0)
        return found

    def share_in(self, time: TimeRange) -> Array:
        """The share of each inside a range, as of one range."""
        whole_or_not = time.holds(self.from_at).astype(np.float64)
        lasts = self.until > self.from_at
        return np.divide(self.within_s(time), self.length_s, out=whole_or_not, where=lasts)


def covered_s(ranges: TimeRanges, time: TimeRange) -> float:
    """Seconds of `time` that lie in at least one of the ranges."""
    order = np.argsort(ranges.from_at, kind="stable")
    begins = ranges.from_at[order]
    ends = np.minimum(ranges.until[order], time.until)
    reached = np.maximum.accumulate(np.concatenate([[time.from_at], ends]))
    covered = float(np.maximum(reached[1:] - np.maximum(begins, reached[:-1]), 0.0).sum())
    # Parts of a range that others cover add up to a rounding error more than the range.
    return min(covered, time.length_s)


def merged(times: TimeRanges) -> list[TimeRange]:
    """The same times in order, those that meet as one; at least one is given."""
    order = np.argsort(times.from_at)
    begins, reached = times.from_at[order], np.maximum.accumulate(times.until[order])
    apart = np.flatnonzero(begins[1:] > reached[:-1])
    first, last = np.append(0, apart + 1), np.append(apart, order.size - 1)
    ends = zip(begins[first].tolist(), reached[last].tolist(), strict=True)
    return [TimeRange(*each) for each in ends]
