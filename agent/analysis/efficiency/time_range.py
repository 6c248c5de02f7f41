"""Stretches of time, and how much of them lies in others."""

from collections.abc import Iterable
from typing import NamedTuple


class TimeRange(NamedTuple):
    """From one moment to another that is not in it, in Unix seconds."""

    from_at: float
    until: float

    @property
    def length_s(self) -> float:
        """Seconds, never negative."""
        return max(self.until - self.from_at, 0.0)

    def within(self, other: "TimeRange") -> "TimeRange":
        """The part of this interval inside another; of no length where they do not meet."""
        from_at = max(self.from_at, other.from_at)
        return TimeRange(from_at, max(min(self.until, other.until), from_at))

    def share_in(self, other: "TimeRange") -> float:
        """The share of this interval inside another; a moment is inside whole or not at all."""
        if self.until > self.from_at:
            return self.within(other).length_s / self.length_s
        return float(other.from_at <= self.from_at < other.until)


def covered_s(intervals: Iterable[TimeRange], window: TimeRange) -> float:
    """Seconds of the window that lie in any of the intervals."""
    covered, reached = 0.0, window.from_at
    for interval in sorted(intervals):
        from_at = max(interval.from_at, reached)
        until = min(interval.until, window.until)
        if until > from_at:
            covered += until - from_at
            reached = until
    return covered
