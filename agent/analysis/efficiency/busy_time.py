"""Busy, idle and unknown seconds of an engine."""

from collections.abc import Sequence
from math import fsum
from typing import NamedTuple

from agent.analysis.efficiency.engine_observation import (
    EngineObservation,
    IntervalState,
    SampleInterval,
)
from agent.analysis.efficiency.request_activity import RequestActivity
from agent.analysis.efficiency.time_range import covered_s


class TimeParts(NamedTuple):
    """Seconds of a minute by what the engine did."""

    busy_s: float
    idle_s: float
    unknown_s: float

    @property
    def length_s(self) -> float:
        """The sum, which is the length of the minute."""
        return fsum(self)


def time_parts(observed: EngineObservation, active: Sequence[RequestActivity]) -> TimeParts:
    """Busy, idle and unknown seconds.

    Between two samples that show no work the engine was idle. Between two that show work it was
    busy while requests with a row were at work, and longer in proportion to the output tokens that
    it counted beyond theirs. It was busy all that time where no row shows work, or where more
    requests ran at both samples than rows show. Without samples it was busy while requests with a
    row were at work; the rest is unknown, never idle.
    """
    parts = [_parts(interval, observed, active) for interval in observed.intervals]
    return TimeParts(*[fsum(seconds) for seconds in zip(*parts, strict=True)])


def _parts(
    interval: SampleInterval, observed: EngineObservation, active: Sequence[RequestActivity]
) -> TimeParts:
    inside = interval.time.within(observed.time)
    if interval.state is IntervalState.UNREAD:
        busy_s = covered_s((activity.whole for activity in active), inside)
        return TimeParts(busy_s, 0.0, max(inside.length_s - busy_s, 0.0))
    busy_s = inside.length_s * _busy_share(interval, active)
    return TimeParts(busy_s, inside.length_s - busy_s, 0.0)


def _busy_share(interval: SampleInterval, active: Sequence[RequestActivity]) -> float:
    """The busy share of the whole interval, so that the minutes on both sides of a cut agree."""
    if interval.state is IntervalState.IDLE:
        return 0.0
    near = [activity for activity in active if _meet(activity, interval)]
    at_work_s = covered_s((activity.whole for activity in near), interval.time)
    explained = _explained(interval, near)
    if not at_work_s or not explained or _others_ran(interval, near):
        return 1.0
    return min(at_work_s / (interval.time.length_s * explained), 1.0)


def _meet(activity: RequestActivity, interval: SampleInterval) -> bool:
    from_at, until = interval.time
    return activity.prefill.from_at <= until and activity.decode.until >= from_at


def _others_ran(interval: SampleInterval, active: Sequence[RequestActivity]) -> bool:
    """Whether at both ends more requests ran than rows show."""
    return all(
        running > sum(activity.whole.from_at <= at < activity.whole.until for activity in active)
        for at, running in zip(interval.time, interval.running, strict=True)
    )


def _explained(interval: SampleInterval, active: Sequence[RequestActivity]) -> float:
    """The share of the interval's output tokens that belongs to requests with a row."""
    if not interval.growth.output_tokens:
        return 1.0
    had = sum(activity.output_in(interval.time) for activity in active)
    return min(had / interval.growth.output_tokens, 1.0)
