"""What an engine's samples show of some time: when it worked or idled, and what it counted."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from math import fsum
from typing import NamedTuple

from agent.analysis.efficiency.request_activity import Activities, TimeRange
from agent.analysis.failures.progress import restart_between
from agent.catalog import engine_facts as fact
from agent.catalog.definitions import FULL_CACHE
from agent.catalog.engines import DIALECTS
from agent.catalog.metric import Metric
from agent.records.engine import EngineSample
from agent.records.event import Confidence

# vLLM's source label of prompt tokens that it computed; all other sources are caches.
_COMPUTED_HERE = "local_compute"
# vLLM's finish reason of requests that were aborted; only its frontend in Rust counts all of them.
# An engine without reasons may count aborted ones too.
_NOT_FINISHED = frozenset([("abort",), ("",)])


class Increase(NamedTuple):
    """What an engine counted in some time; None if it has no such counter.

    `cached_tokens` are the part of `input_tokens` that was not computed, `first_tokens` the part of
    `output_tokens` that prefill computed. FLOPs and bytes are the engine's own estimate per GPU,
    summed over data-parallel ranks. `finished` requests were not aborted, `refused` not admitted.
    """

    steps: float | None = None
    input_tokens: float | None = None
    cached_tokens: float | None = None
    output_tokens: float | None = None
    first_tokens: float | None = None
    flops: float | None = None
    read_bytes: float | None = None
    written_bytes: float | None = None
    preemptions: float | None = None
    draft_tokens: float | None = None
    accepted_draft_tokens: float | None = None
    finished: float | None = None
    refused: float | None = None
    drafts: float | None = None
    prefix_query_tokens: float | None = None
    prefix_hit_tokens: float | None = None
    step_tokens: float | None = None

    @property
    def computed_tokens(self) -> float | None:
        """Prompt tokens that were computed; all of them if the engine counts no cached ones."""
        if self.input_tokens is None:
            return None
        return max(self.input_tokens - (self.cached_tokens or 0.0), 0.0)

    @property
    def cached_share(self) -> float:
        """The share of prompt tokens that was not computed; 0 if it is unknown."""
        if not self.input_tokens or self.cached_tokens is None:
            return 0.0
        return min(self.cached_tokens / self.input_tokens, 1.0)

    @property
    def moved(self) -> bool:
        """Whether any counter shows that the engine worked."""
        return any((self.steps, self.input_tokens, self.output_tokens))

    def times(self, share: float) -> "Increase":
        """This share of every counter."""
        return Increase(*[None if value is None else value * share for value in self])

    def plus(self, other: "Increase") -> "Increase":
        """The sum; a counter that only one of them knows has that one's value."""
        return Increase(*[_added(mine, yours) for mine, yours in zip(self, other, strict=True)])


def increase_between(before: EngineSample, after: EngineSample, *, restarted: bool) -> Increase:
    """What the engine counted between two samples.

    After a restart or a counter reset the new values are all that is known to have been counted.
    """
    then = [0.0] * len(Increase._fields) if restarted else list(_counters(before))
    return Increase(
        *[counter_increase(old, new) for old, new in zip(then, _counters(after), strict=True)]
    )


def counter_increase(before: float | None, after: float | None) -> float | None:
    """How far a counter went up. After a reset the new value is all increase."""
    if before is None or after is None:
        return None
    return after - before if after >= before else max(after, 0.0)


def _added(mine: float | None, yours: float | None) -> float | None:
    if mine is None or yours is None:
        return yours if mine is None else mine
    return mine + yours


def _counters(sample: EngineSample) -> Iterator[float | None]:
    yield _value(sample, fact.STEPS)
    yield _value(sample, fact.INPUT_TOKENS)
    yield _cached(sample)
    yield _value(sample, fact.OUTPUT_TOKENS)
    yield sample.fact(fact.FIRST_TOKENS)
    yield _value(sample, fact.ESTIMATED_GPU_FLOPS)
    yield _value(sample, fact.ESTIMATED_GPU_READ_BYTES)
    yield _value(sample, fact.ESTIMATED_GPU_WRITE_BYTES)
    yield _value(sample, fact.PREEMPTIONS)
    yield _value(sample, fact.SPEC_DECODE_DRAFT_TOKENS)
    yield _value(sample, fact.SPEC_DECODE_ACCEPTED_TOKENS)
    yield _by_label(sample, fact.REQUESTS_FINISHED, but=_NOT_FINISHED)
    yield _by_label(sample, fact.ADMISSION_REJECTIONS)
    yield _value(sample, fact.SPEC_DECODE_DRAFTS)
    yield _value(sample, fact.PREFIX_CACHE_QUERY_TOKENS)
    yield _value(sample, fact.PREFIX_CACHE_HIT_TOKENS)
    yield _value(sample, fact.STEP_TOKENS)


def _value(sample: EngineSample, metric: Metric) -> float | None:
    return sample.fact(metric.name)


def _by_label(
    sample: EngineSample, metric: Metric, but: frozenset[tuple[str, ...]] = frozenset()
) -> float | None:
    """The sum over the values of the metric's label but some; None without any other."""
    found = [
        value
        for (name, labels), value in sample.facts.items()
        if name == metric.name and labels not in but
    ]
    return sum(found) if found else None


def _cached(sample: EngineSample) -> float | None:
    by_source = fact.INPUT_TOKENS_BY_SOURCE.name
    sources = {key[1]: value for key, value in sample.facts.items() if key[0] == by_source}
    if sources:
        return sum(value for source, value in sources.items() if source != (_COMPUTED_HERE,))
    cached = _value(sample, fact.CACHED_INPUT_TOKENS)
    return _value(sample, fact.PREFIX_CACHE_HIT_TOKENS) if cached is None else cached


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


class BatchUse(NamedTuple):
    """How full the batch was; each pair is None if the engine's limit or count is unknown.

    `running_request_s` is the time of all running requests together, `place_s` that of all slots
    for them. `limited_step_tokens` are the tokens of steps, `step_room_tokens` their budgets.
    """

    running_request_s: float | None
    place_s: float | None
    limited_step_tokens: float | None
    step_room_tokens: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInterval:
    """The time between two samples that follow each other, or a time without any.

    `running` is how many requests ran at its two ends, None if that is unknown, and `read_s` how
    long after them the engine may have rendered what they show. `cache_full` is the share of it in
    which the KV cache was full: requests waited or were preempted. `slots` for running requests
    and `step_budget_tokens` are the engine's limits. `restarted`: another engine process answered
    at its end than at its start.
    """

    time: TimeRange
    state: IntervalState
    increase: Increase
    running: tuple[float | None, float | None] = (None, None)
    read_s: tuple[float, float] = (SHORT_READ_S, SHORT_READ_S)
    cache_full: float = 0.0
    slots: float | None = None
    step_budget_tokens: float | None = None
    restarted: bool = False

    @property
    def mean_running(self) -> float | None:
        """Requests that ran, taken to change evenly from one sample to the next."""
        before, after = self.running
        return None if before is None or after is None else (before + after) / 2

    @property
    def step_room_tokens(self) -> float | None:
        """The most tokens that the steps may compute."""
        budget, steps = self.step_budget_tokens, self.increase.steps
        return None if budget is None or steps is None else budget * steps

    @property
    def counted(self) -> bool:
        """Whether one process counted tokens from its start to its end."""
        tokens = (self.increase.input_tokens, self.increase.output_tokens)
        return not self.restarted and any(each is not None for each in tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineObservation:
    """Some time of one engine. `intervals` follow each other, cover it and may reach beyond it.

    `increase` is that of `time` alone. `ranks` are data-parallel ranks. The tokens in
    `counted_at_end` are counted when their request ends.
    """

    time: TimeRange
    intervals: tuple[SampleInterval, ...]
    increase: Increase
    ranks: int
    counted_at_end: frozenset[Metric] = frozenset()

    def as_counted(self, active: Activities, tokens: Metric) -> Activities:
        """Requests with these tokens at the times at which the engine counts them."""
        return replace(active, first_at=active.last_at) if tokens in self.counted_at_end else active

    @property
    def cache_full_s(self) -> float:
        """Seconds of `time` in which the KV cache was full."""
        return fsum(
            interval.cache_full * interval.time.within(self.time).length_s
            for interval in self.intervals
        )

    @property
    def batch(self) -> BatchUse:
        """How full the batch was in `time`, by the intervals that were read."""
        read = [each for each in self.intervals if each.state is not IntervalState.UNREAD]
        return BatchUse(
            *_sums(
                (each.mean_running, each.slots, each.time.within(self.time).length_s)
                for each in read
            ),
            *_sums(
                (each.increase.step_tokens, each.step_room_tokens, each.time.share_in(self.time))
                for each in read
            ),
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
    increase = Increase()
    for interval in intervals:
        increase = increase.plus(interval.increase.times(interval.time.share_in(time)))
    return EngineObservation(
        time=time,
        intervals=intervals,
        increase=increase,
        ranks=max((_ranks(sample) for sample in ordered), default=1),
        counted_at_end=frozenset[Metric]().union(*map(_counted_at_end, ordered)),
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
        time=TimeRange(from_at, until), state=IntervalState.UNREAD, increase=Increase()
    )


def _between(before: EngineSample, after: EngineSample, max_gap_s: float) -> SampleInterval:
    restarted = restart_between(before, after)
    # One counter that fell in a process that still runs says nothing about the other counters.
    anew = restarted in (Confidence.CERTAIN, Confidence.PROBABLE)
    # A data-parallel rank that leaves takes its counts along, and one that comes brings its own.
    other_ranks = not anew and _ranks(before) != _ranks(after)
    increase = Increase() if other_ranks else increase_between(before, after, restarted=anew)
    unread = restarted is not None or other_ranks or after.at - before.at > max_gap_s
    return SampleInterval(
        time=TimeRange(before.at, after.at),
        state=IntervalState.UNREAD if unread else _state(before, after, increase),
        increase=increase,
        running=(_running(before), _running(after)),
        read_s=(_read_s(before), _read_s(after)),
        cache_full=0.0 if unread else _full_share(before, after, increase),
        slots=after.fact(fact.MAX_RUNNING_REQUESTS.name),
        step_budget_tokens=after.fact(fact.MAX_STEP_TOKENS.name),
        restarted=anew,
    )


def _sums(
    parts: Iterable[tuple[float | None, float | None, float]],
) -> tuple[float | None, float | None]:
    """The sums of two figures, each times the third, if both are known; None without any."""
    known = [
        (one * factor, other * factor)
        for one, other, factor in parts
        if one is not None and other is not None
    ]
    return (
        (fsum(each[0] for each in known), fsum(each[1] for each in known)) if known else (None,) * 2
    )


def _running(sample: EngineSample) -> float | None:
    return sample.fact(fact.REQUESTS_RUNNING.name)


def _read_s(sample: EngineSample) -> float:
    """How long after its time the engine may have rendered what a sample shows."""
    measured = sample.fact(fact.SCRAPE_DURATION.name) or 0.0
    return min(max(measured, SHORT_READ_S), LONGEST_READ_S)


def _state(before: EngineSample, after: EngineSample, increase: Increase) -> IntervalState:
    running = (_running(before), _running(after))
    known = (increase.steps, increase.input_tokens, increase.output_tokens, *running)
    if all(value is None for value in known):
        return IntervalState.UNREAD
    return IntervalState.AT_WORK if increase.moved or any(running) else IntervalState.IDLE


def _counted_at_end(sample: EngineSample) -> frozenset[Metric]:
    dialect = DIALECTS.get(sample.dialect)
    return frozenset() if dialect is None else dialect.counted_at_end


def _ranks(sample: EngineSample) -> int:
    return int(sample.fact(fact.DATA_PARALLEL_RANKS.name) or 1)


def _full_share(before: EngineSample, after: EngineSample, increase: Increase) -> float:
    if increase.preemptions:
        return 1.0
    return (_cache_full(before) + _cache_full(after)) / 2


def _cache_full(sample: EngineSample) -> bool:
    usage = sample.fact(fact.KV_CACHE_USAGE.name) or 0.0
    return usage >= FULL_CACHE and bool(sample.fact(fact.REQUESTS_WAITING.name))
