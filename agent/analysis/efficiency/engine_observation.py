"""What an engine's samples show of some time: when it worked, when it idled, what it counted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import fsum

from agent.analysis.efficiency.counter_growth import Growth, growth_between
from agent.analysis.efficiency.time_range import TimeRange
from agent.analysis.failures.restarts import restart_between
from agent.catalog import engine_facts as fact
from agent.catalog.thresholds import FULL_CACHE
from agent.records.engine import EngineSample
from agent.records.event import Confidence

# A sample has the time at which its read began. Clocks and other threads make the read later, and
# few reads last as long as this.
SHORT_READ_S = 0.5
# No scrape lasts longer (the timeout of `EngineSource`, and what precedes it).
LONGEST_READ_S = 5.0


class IntervalState(StrEnum):
    """What two samples that follow each other show of the time between them."""

    AT_WORK = "at work"
    IDLE = "idle"
    UNREAD = "unread"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInterval:
    """The time between two samples that follow each other, or a time without any.

    `running` is how many requests ran at its two ends, None where that is unknown, and `read_s` how
    long after them the engine may have rendered what they show. `cache_full` is the share of it in
    which the KV cache was full: requests waited or were preempted. `restarted`: another engine
    process answered at its end than at its start.
    """

    time: TimeRange
    state: IntervalState
    growth: Growth
    running: tuple[float | None, float | None] = (None, None)
    read_s: tuple[float, float] = (SHORT_READ_S, SHORT_READ_S)
    cache_full: float = 0.0
    restarted: bool = False

    @property
    def counted(self) -> bool:
        """Whether one process counted tokens from its start to its end."""
        tokens = (self.growth.input_tokens, self.growth.output_tokens)
        return not self.restarted and any(each is not None for each in tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineObservation:
    """Some time of one engine. `intervals` follow each other, cover it and may reach beyond it.

    `growth` is that of `time` alone. `ranks` are data-parallel ranks.
    """

    time: TimeRange
    intervals: tuple[SampleInterval, ...]
    growth: Growth
    ranks: int

    @property
    def cache_full_s(self) -> float:
        """Seconds of `time` in which the KV cache held no more requests."""
        return fsum(
            interval.cache_full * interval.time.within(self.time).length_s
            for interval in self.intervals
        )


def observe(
    samples: Sequence[EngineSample], time: TimeRange, *, max_gap_s: float
) -> EngineObservation:
    """The time as the engine's samples show it; `samples` include the nearest on either side.

    Two samples more than `max_gap_s` apart, or with a restart between them, leave the time between
    them unread. Raises ValueError for a time of no length.
    """
    if time.length_s <= 0:
        raise ValueError(f"the time must end after it begins: {tuple(time)}")
    ordered = sorted(samples, key=lambda sample: sample.at)
    intervals = tuple(_intervals(ordered, time, max_gap_s))
    growth = Growth()
    for interval in intervals:
        growth = growth.plus(interval.growth.times(interval.time.share_in(time)))
    return EngineObservation(
        time=time,
        intervals=intervals,
        growth=growth,
        ranks=max((_ranks(sample) for sample in ordered), default=1),
    )


def minute_start_near(due_at: float, sampled_at: Sequence[float], *, max_gap_s: float) -> float:
    """Where the minute that is due at `due_at` begins: at the first sample from there on.

    There the engine's counters are known exactly. Without a sample soon, it begins when due.
    """
    soon = [at for at in sampled_at if due_at <= at < due_at + max_gap_s]
    return min(soon, default=due_at)


def _intervals(
    ordered: Sequence[EngineSample], time: TimeRange, max_gap_s: float
) -> Iterator[SampleInterval]:
    sampled = TimeRange(time.until, time.until)
    if ordered:
        sampled = TimeRange(ordered[0].at, ordered[-1].at)
    if time.from_at < sampled.from_at:
        yield _unread(time.from_at, min(sampled.from_at, time.until))
    for before, after in pairwise(ordered):
        if before.at < after.at and before.at < time.until and after.at > time.from_at:
            yield _between(before, after, max_gap_s)
    if sampled.until < time.until:
        yield _unread(max(sampled.until, time.from_at), time.until)


def _unread(from_at: float, until: float) -> SampleInterval:
    return SampleInterval(
        time=TimeRange(from_at, until), state=IntervalState.UNREAD, growth=Growth()
    )


def _between(before: EngineSample, after: EngineSample, max_gap_s: float) -> SampleInterval:
    restarted = restart_between(before, after)
    # One counter that fell in a process that still runs says nothing about the other counters.
    anew = restarted in (Confidence.CERTAIN, Confidence.PROBABLE)
    growth = growth_between(before, after, restarted=anew)
    unread = restarted is not None or after.at - before.at > max_gap_s
    return SampleInterval(
        time=TimeRange(before.at, after.at),
        state=IntervalState.UNREAD if unread else _state(before, after, growth),
        growth=growth,
        running=(_running(before), _running(after)),
        read_s=(_read_s(before), _read_s(after)),
        cache_full=0.0 if unread else _full_share(before, after, growth),
        restarted=anew,
    )


def _running(sample: EngineSample) -> float | None:
    return sample.fact(fact.REQUESTS_RUNNING.name)


def _read_s(sample: EngineSample) -> float:
    """How long after its time the engine may have rendered what a sample shows."""
    measured = sample.fact(fact.SCRAPE_DURATION.name) or 0.0
    return min(max(measured, SHORT_READ_S), LONGEST_READ_S)


def _state(before: EngineSample, after: EngineSample, growth: Growth) -> IntervalState:
    running = (_running(before), _running(after))
    known = (growth.steps, growth.input_tokens, growth.output_tokens, *running)
    if all(value is None for value in known):
        return IntervalState.UNREAD
    return IntervalState.AT_WORK if growth.moved or any(running) else IntervalState.IDLE


def _ranks(sample: EngineSample) -> int:
    return int(sample.fact(fact.DATA_PARALLEL_RANKS.name) or 1)


def _full_share(before: EngineSample, after: EngineSample, growth: Growth) -> float:
    if growth.preemptions:
        return 1.0
    return (_cache_full(before) + _cache_full(after)) / 2


def _cache_full(sample: EngineSample) -> bool:
    usage = sample.fact(fact.KV_CACHE_USAGE.name) or 0.0
    return usage >= FULL_CACHE and bool(sample.fact(fact.REQUESTS_WAITING.name))
