"""What an engine's samples say of a window: when it worked, when it idled, what it counted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import fsum

from agent.analysis.efficiency.counter_growth import Growth, growth_between
from agent.analysis.efficiency.time_range import TimeRange
from agent.analysis.failures.restarts import restart_between
from agent.catalog import engine_facts as fact
from agent.records.engine import EngineSample
from agent.records.event import Confidence

# A cache this full while requests wait lets no more of them run.
_FULL_CACHE = 0.95


class IntervalState(StrEnum):
    """What two readings in a row say of the time between them."""

    AT_WORK = "at work"
    IDLE = "idle"
    UNREAD = "unread"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInterval:
    """The time between two readings in a row, whole; or a time without any.

    `running` is how many requests ran at its two ends, 0 where that was not told. `cache_full` is
    the share of it in which requests waited, or were thrown back, because the KV cache held no
    more.
    """

    interval: TimeRange
    sight: IntervalState
    growth: Growth
    running: tuple[float, float] = (0.0, 0.0)
    cache_full: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A window of one engine. `stretches` follow each other and cover it, in part or beyond.

    `growth` is that of the window. `ranks` are data-parallel ranks.
    """

    window: TimeRange
    stretches: tuple[SampleInterval, ...]
    growth: Growth
    ranks: int

    @property
    def reach(self) -> TimeRange:
        """From the first moment that its stretches speak of to the last: whose rows are needed."""
        return TimeRange(self.stretches[0].interval.from_at, self.stretches[-1].interval.until)

    @property
    def cache_full_s(self) -> float:
        """Seconds of the window in which the KV cache held no more requests."""
        return fsum(
            stretch.cache_full * stretch.interval.within(self.window).length_s
            for stretch in self.stretches
        )


def observe(samples: Sequence[EngineSample], window: TimeRange, *, max_gap_s: float) -> Observation:
    """The window as its engine's samples show it, of which the nearest around it are needed.

    Two readings further apart than `max_gap_s`, or with a restart between them, leave the time
    between them unread. Raises ValueError for a window of no length.
    """
    if window.length_s <= 0:
        raise ValueError(f"a window ends after it begins, this one is {tuple(window)}")
    ordered = sorted(samples, key=lambda sample: sample.at)
    stretches = tuple(_stretches(ordered, window, max_gap_s))
    growth = Growth()
    for stretch in stretches:
        growth = growth.plus(stretch.growth.times(stretch.interval.share_in(window)))
    return Observation(
        window=window,
        stretches=stretches,
        growth=growth,
        ranks=max((_ranks(sample) for sample in ordered), default=1),
    )


def minute_start_near(mark: float, moments: Sequence[float], *, max_gap_s: float) -> float:
    """Where a window that should begin at the mark best begins: at the first reading from there.

    There the engine's counters are known exactly. The mark itself where no reading follows soon.
    """
    soon = [moment for moment in moments if mark <= moment < mark + max_gap_s]
    return min(soon, default=mark)


def _stretches(
    ordered: Sequence[EngineSample], window: TimeRange, max_gap_s: float
) -> Iterator[SampleInterval]:
    seen = TimeRange(window.until, window.until)
    if ordered:
        seen = TimeRange(ordered[0].at, ordered[-1].at)
    if window.from_at < seen.from_at:
        yield _unread(window.from_at, min(seen.from_at, window.until))
    for before, after in pairwise(ordered):
        if before.at < after.at and before.at < window.until and after.at > window.from_at:
            yield _between(before, after, max_gap_s)
    if seen.until < window.until:
        yield _unread(max(seen.until, window.from_at), window.until)


def _unread(from_at: float, until: float) -> SampleInterval:
    return SampleInterval(
        interval=TimeRange(from_at, until), sight=IntervalState.UNREAD, growth=Growth()
    )


def _between(before: EngineSample, after: EngineSample, max_gap_s: float) -> SampleInterval:
    restarted = restart_between(before, after)
    # In a process that is still there, one counter that fell does not make others begin anew.
    anew = restarted in (Confidence.CERTAIN, Confidence.PROBABLE)
    growth = growth_between(before, after, restarted=anew)
    unread = restarted is not None or after.at - before.at > max_gap_s
    return SampleInterval(
        interval=TimeRange(before.at, after.at),
        sight=IntervalState.UNREAD if unread else _sight(before, after, growth),
        growth=growth,
        running=(_running(before) or 0.0, _running(after) or 0.0),
        cache_full=0.0 if unread else _full_share(before, after, growth),
    )


def _running(sample: EngineSample) -> float | None:
    return sample.fact(fact.REQUESTS_RUNNING.name)


def _sight(before: EngineSample, after: EngineSample, growth: Growth) -> IntervalState:
    running = (_running(before), _running(after))
    told = (growth.steps, growth.input_tokens, growth.output_tokens, *running)
    if all(value is None for value in told):
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
    return usage >= _FULL_CACHE and bool(sample.fact(fact.REQUESTS_WAITING.name))
