"""Ranges of time, and how much of one lies inside another."""

from collections.abc import Iterable
from typing import NamedTuple


class TimeRange(NamedTuple):
    """A range of time in Unix seconds. `until` is not part of it."""

    from_at: float
    until: float

    @property
    def length_s(self) -> float:
        """Seconds, never negative."""
        return max(self.until - self.from_at, 0.0)

    def within(self, other: "TimeRange") -> "TimeRange":
        """The part of this range inside another; of no length where they do not meet."""
        from_at = max(self.from_at, other.from_at)
        return TimeRange(from_at, max(min(self.until, other.until), from_at))

    def share_in(self, other: "TimeRange") -> float:
        """The share of this range inside another; a range of no length is inside whole or not."""
        if self.until > self.from_at:
            return self.within(other).length_s / self.length_s
        return float(other.from_at <= self.from_at < other.until)


def covered_s(ranges: Iterable[TimeRange], time: TimeRange) -> float:
    """Seconds of `time` that lie in at least one of the ranges."""
    covered, reached = 0.0, time.from_at
    for each in sorted(ranges):
        from_at = max(each.from_at, reached)
        until = min(each.until, time.until)
        if until > from_at:
            covered += until - from_at
            reached = until
    # Parts of a range that others cover add up to a rounding error more than the range.
    return min(covered, max(time.length_s, 0.0))
