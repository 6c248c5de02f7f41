"""Busy, idle and unknown seconds of an engine, and how long requests without a row were at work."""

from math import fsum
from typing import NamedTuple

import numpy as np

from agent.analysis.efficiency.engine_observation import (
    EngineObservation,
    IntervalState,
    SampleInterval,
)
from agent.analysis.efficiency.request_activity import EVER, Activities, TimeRange, covered_s
from agent.catalog import engine_facts as fact
from agent.records.columns import Mask

# So few prompt tokens take as long as one: their step waits for the weights. The ridges of GPUs for
# servers are 150 to 400 FLOPs per byte, and so as many tokens in 16 bits.
FREE_TOKENS = 256


class Pace(NamedTuple):
    """Seconds of a step that decodes and of a prompt token; None if they are unknown."""

    step_s: float | None = None
    token_s: float | None = None


def pace_of(active: Activities) -> Pace:
    """How fast rows were. Small prompts take a whole step, so only the longest ones count."""
    decoding = active.chosen((active.decoded_tokens > 0) & (active.decode.length_s > 0))
    steps = float((decoding.decoded_tokens / decoding.choices).sum())
    timed = active.chosen(active.timed & (active.prefill.length_s > 0))
    most = timed.computed_tokens.max(initial=0.0)
    longest = timed.chosen(timed.computed_tokens >= max(most / 2, 1.0))
    tokens = float(np.maximum(longest.computed_tokens, FREE_TOKENS).sum())
    return Pace(
        float(decoding.decode.length_s.sum()) / steps if steps else None,
        covered_s(longest.prefill, EVER) / tokens if tokens else None,
    )


def alone_s(interval: SampleInterval, pace: Pace) -> float | None:
    """Seconds that the counted tokens and steps of an interval without rows took.

    None if the pace is unknown, or a prompt may be at work that is not counted yet.
    """
    increase = interval.increase
    unfinished = not increase.output_tokens and any(each != 0 for each in interval.running)
    if unfinished or increase.output_tokens is None or pace.step_s is None or pace.token_s is None:
        return None
    steps = increase.output_tokens if increase.steps is None else increase.steps
    return steps * pace.step_s + (increase.computed_tokens or 0.0) * pace.token_s


def beyond_s(interval: SampleInterval, near: Activities, pace: Pace) -> float | None:
    """Seconds of the steps that the engine counted beyond those of rows; None if unknown.

    With drafts a step has several tokens of a stream, and the steps of rows are unknown.
    """
    increase = interval.increase
    if increase.steps is None or pace.step_s is None or increase.draft_tokens:
        return None
    return max(increase.steps - _steps_of(near, interval.time), 0.0) * pace.step_s


def _steps_of(active: Activities, time: TimeRange) -> float:
    """Steps that gave tokens to rows: those that decode, and prompts' last ones without decode."""
    decoding = active.chosen(active.decoded_tokens > 0)
    decoding_s, working_s = covered_s(decoding.decode, time), covered_s(active.whole, time)
    together_s = float(decoding.decode.within_s(time).sum())
    streams = decoding.decoded_tokens / decoding.choices * decoding.decode.share_in(time)
    prompts = np.unique(active.first_at[active.first_in(time) > 0]).size
    alone = 1.0 - decoding_s / working_s if working_s else 0.0
    decoded = float(streams.sum()) * decoding_s / together_s if together_s else 0.0
    return prompts * alone + decoded


class TimeParts(NamedTuple):
    """Seconds of a minute by what the engine did."""

    busy_s: float
    idle_s: float
    unknown_s: float

    @property
    def length_s(self) -> float:
        """The sum, which is the length of the minute."""
        return fsum(self)


def time_parts(observed: EngineObservation, active: Activities) -> TimeParts:
    """Busy, idle and unknown seconds of the observed time."""
    parts = interval_parts(observed, active)
    return TimeParts(*[fsum(seconds) for seconds in zip(*parts, strict=True)])


def interval_parts(observed: EngineObservation, active: Activities) -> list[TimeParts]:
    """Busy, idle and unknown seconds of each interval, as far as it is in the observed time.

    Between two samples that show no work the engine was idle, but for requests that began and ended
    while the first was read: that one has counted them. Between two that show work it was busy
    while requests with a row were at work, and longer for what it counted beyond theirs. It was
    busy all that time if more requests ran at both samples than rows show, or if nothing
    shows for how long. Without samples it was busy while requests with a row were at work; the rest
    is unknown, never idle.
    """
    # Ranks step together, and which of them served a request is unknown.
    pace = pace_of(active) if observed.ranks == 1 else Pace()
    return [_parts(interval, observed, active, pace) for interval in observed.intervals]


def _parts(
    interval: SampleInterval,
    observed: EngineObservation,
    active: Activities,
    pace: Pace,
) -> TimeParts:
    inside = interval.time.within(observed.time)
    if interval.state is IntervalState.UNREAD:
        busy_s = covered_s(active.whole, inside)
        return TimeParts(busy_s, 0.0, max(inside.length_s - busy_s, 0.0))
    busy_s = inside.length_s * _busy_share(interval, observed, active, pace)
    return TimeParts(busy_s, inside.length_s - busy_s, 0.0)


def _busy_share(
    interval: SampleInterval, observed: EngineObservation, active: Activities, pace: Pace
) -> float:
    """The busy share of the whole interval, so that the minutes on both sides of a cut agree."""
    if interval.state is IntervalState.IDLE:
        return _worked_while_read(interval, active)
    near = active.chosen(_meet(active, interval.time))
    at_work_s = covered_s(near.whole, interval.time)
    if not at_work_s and _worked_later(interval, observed, active):
        return 0.0
    unseen_s = _unseen_s(interval, observed, near, pace)
    if unseen_s is None or _others_ran(interval, active):
        return 1.0
    return min((at_work_s + unseen_s) / interval.time.length_s, 1.0)


def _unseen_s(
    interval: SampleInterval, observed: EngineObservation, near: Activities, pace: Pace
) -> float | None:
    """Busy seconds in which no row was at work; None if nothing shows them.

    A step of rows decodes unseen tokens too, so that in proportion to tokens the time is too long;
    by steps it is where rows have hardly any.
    """
    at_work_s = covered_s(near.whole, interval.time)
    if not at_work_s:
        return alone_s(interval, pace)
    explained = _explained(interval, observed.as_counted(near, fact.OUTPUT_TOKENS))
    by_tokens = at_work_s / explained - at_work_s if explained else None
    known = [each for each in (by_tokens, beyond_s(interval, near, pace)) if each is not None]
    return min(known, default=None)


def _meet(active: Activities, time: TimeRange) -> Mask:
    return (active.begin_at <= time.until) & (active.last_at >= time.from_at)


def _others_ran(interval: SampleInterval, active: Activities) -> bool:
    """Whether at both ends more requests ran than rows show."""
    return all(
        (running or 0.0) > np.count_nonzero(_at_work_in(active, read))
        for read, running in zip(_reads(interval), interval.running, strict=True)
    )


def _reads(interval: SampleInterval) -> tuple[TimeRange, TimeRange]:
    """When the engine may have rendered what the samples at the two ends show."""
    (from_at, until), (first_s, last_s) = interval.time, interval.read_s
    return TimeRange(from_at, from_at + first_s), TimeRange(until, until + last_s)


def _at_work_in(active: Activities, time: TimeRange) -> Mask:
    return (active.begin_at < time.until) & (time.from_at < active.last_at)


def _worked_while_read(interval: SampleInterval, active: Activities) -> float:
    """The share in which requests worked that began and ended while the first sample was read."""
    read, _ = _reads(interval)
    inside = (read.from_at <= active.begin_at) & (active.last_at <= read.until)
    return covered_s(active.whole.chosen(inside), interval.time) / interval.time.length_s


def _worked_later(
    interval: SampleInterval, observed: EngineObservation, active: Activities
) -> bool:
    """Whether all that the sample at the end shows began while it was read."""
    _, read = _reads(interval)
    began = active.chosen(read.holds(active.begin_at))
    prompts = observed.as_counted(began, fact.INPUT_TOKENS)
    outputs = observed.as_counted(began, fact.OUTPUT_TOKENS)
    increase, (ran_before, ran_after) = interval.increase, interval.running
    return (
        began.rows.size > 0
        and not ran_before
        and (ran_after or 0.0) <= began.rows.size
        and (increase.output_tokens or 0.0) <= float(outputs.output_in(read).sum())
        and (increase.computed_tokens or 0.0) <= float(prompts.input_counted_in(read).sum())
    )


def _explained(interval: SampleInterval, counted: Activities) -> float:
    """The share of the interval's output tokens that belongs to requests with a row."""
    if not interval.increase.output_tokens:
        return 1.0
    had = float(counted.output_in(interval.time).sum())
    _, reading = _reads(interval)
    read = float(counted.output_in(reading).sum())
    return min((had + read) / interval.increase.output_tokens, 1.0)
