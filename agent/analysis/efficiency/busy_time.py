"""For how much of a window an engine worked."""

from collections.abc import Sequence
from math import fsum
from typing import NamedTuple

from agent.analysis.efficiency.observation import IntervalState, Observation, SampleInterval
from agent.analysis.efficiency.request_activity import RequestActivity
from agent.analysis.efficiency.time_range import covered_s


class TimeParts(NamedTuple):
    """Seconds of a window."""

    busy_s: float
    idle_s: float
    unknown_s: float

    @property
    def length_s(self) -> float:
        """All of them: the window's length."""
        return fsum(self)


def time_parts(observed: Observation, active: Sequence[RequestActivity]) -> TimeParts:
    """Busy, idle and unknown seconds.

    Where the engine was read and nothing shows work, it was idle. Where something does, it was busy
    while requests with a row were at work, longer by as much as it counted more output tokens than
    they had; all the time where no row tells, or where other requests ran at both readings. Where
    it was not read, it was busy while requests with a row were at work, and the rest is unknown,
    never idle.
    """
    parts = [_parts(stretch, observed, active) for stretch in observed.stretches]
    return TimeParts(*[fsum(seconds) for seconds in zip(*parts, strict=True)])


def _parts(
    stretch: SampleInterval, observed: Observation, active: Sequence[RequestActivity]
) -> TimeParts:
    inside = stretch.interval.within(observed.window)
    if stretch.sight is IntervalState.UNREAD:
        busy_s = covered_s((activity.whole for activity in active), inside)
        return TimeParts(busy_s, 0.0, max(inside.length_s - busy_s, 0.0))
    busy_s = inside.length_s * _busy_share(stretch, active)
    return TimeParts(busy_s, inside.length_s - busy_s, 0.0)


def _busy_share(stretch: SampleInterval, active: Sequence[RequestActivity]) -> float:
    """Of the whole stretch, so that windows which cut it agree."""
    if stretch.sight is IntervalState.IDLE:
        return 0.0
    near = [activity for activity in active if _meet(activity, stretch)]
    at_work_s = covered_s((activity.whole for activity in near), stretch.interval)
    explained = _explained(stretch, near)
    if not at_work_s or not explained or _others_ran(stretch, near):
        return 1.0
    return min(at_work_s / (stretch.interval.length_s * explained), 1.0)


def _meet(activity: RequestActivity, stretch: SampleInterval) -> bool:
    from_at, until = stretch.interval
    return activity.prefill.from_at <= until and activity.decode.until >= from_at


def _others_ran(stretch: SampleInterval, active: Sequence[RequestActivity]) -> bool:
    """Whether more requests ran than rows tell of, at both ends: some of them all the time."""
    return all(
        running > sum(activity.whole.from_at <= at < activity.whole.until for activity in active)
        for at, running in zip(stretch.interval, stretch.running, strict=True)
    )


def _explained(stretch: SampleInterval, active: Sequence[RequestActivity]) -> float:
    """The share of the stretch's output tokens that were those of requests with a row."""
    if not stretch.growth.output_tokens:
        return 1.0
    had = sum(activity.output_in(stretch.interval) for activity in active)
    return min(had / stretch.growth.output_tokens, 1.0)
