"""What an engine did in a period, and the slices between two samples."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from agent.analysis.causes.step_costs import beyond_free
from agent.catalog import engine_facts as fact
from agent.catalog.metric import Metric
from agent.records.engine import EngineSample

# Up to this share of a period the duration of its steps may be unknown.
_MOST_UNTIMED = 0.3
# The queue waits for memory, for slots or for the token budget of a step above these shares.
KV_FULL = 0.95
KV_SHORT = 0.7
AT_CAP = 0.98
BUDGET_FULL = 0.9


class Limits(NamedTuple):
    """How many requests may run at once, and how many tokens a step may have; None: unknown."""

    running: float | None = None
    step_tokens: float | None = None


class Slice(NamedTuple):
    """What an engine did from `since` to `until`: one step, or all steps between two samples.

    Times are in Unix seconds. `running`, both `waiting` and `kv_usage` are values at the end.
    `busy_s` is the time that the steps took, None if it is unknown. `products` as in ComputedWork,
    only of steps. Only samples give the fields from `arrivals` on; `started` requests left the
    queue.
    """

    since: float
    until: float
    steps: float
    prefill_tokens: float
    decode_tokens: float
    running: float
    waiting_capacity: float
    waiting_deferred: float
    kv_usage: float
    preempted: float
    busy_s: float | None
    products: float = 0.0
    arrivals: float = 0.0
    started: float = 0.0
    hit_tokens: float = 0.0
    query_tokens: float = 0.0
    drafts: float = 0.0
    accepted: float = 0.0
    rejected: float = 0.0


class Activity(msgspec.Struct, frozen=True):
    """The sums of the slices of a period; `seconds` of it are covered by slices.

    Each second with a queue counts once: in `kv_full_s`, `deferred_s`, `at_cap_s` or
    `budget_full_s`, by the first of memory, deferral, slots and token budget that held the queue,
    or in `other_wait_s`. `running_s`, `kv_running_s` and `cap_running_s` are running requests times
    seconds: of all time, and of the time in which memory or slots held the queue.

    `busy_s` is the time of the steps, `prompt_steps` how many of them finished a prompt,
    `large_tokens` and `products` as in ComputedWork. In `untimed_s` the duration of the steps is
    unknown.
    """

    seconds: float = 0.0
    steps: float = 0.0
    prefill_tokens: float = 0.0
    decode_tokens: float = 0.0
    preempted: float = 0.0
    running_s: float = 0.0
    kv_full_s: float = 0.0
    deferred_s: float = 0.0
    at_cap_s: float = 0.0
    budget_full_s: float = 0.0
    other_wait_s: float = 0.0
    kv_running_s: float = 0.0
    cap_running_s: float = 0.0
    busy_s: float = 0.0
    prompt_steps: float = 0.0
    large_tokens: float = 0.0
    products: float = 0.0
    untimed_s: float = 0.0
    arrivals: float = 0.0
    started: float = 0.0
    hit_tokens: float = 0.0
    query_tokens: float = 0.0
    drafts: float = 0.0
    accepted: float = 0.0
    rejected: float = 0.0

    @property
    def timed(self) -> bool:
        """Whether the time of the steps is known."""
        return self.busy_s > 0 and self.untimed_s <= _MOST_UNTIMED * self.seconds

    @property
    def waits_s(self) -> float:
        """The time with a queue."""
        held_s = self.kv_full_s + self.deferred_s + self.at_cap_s + self.budget_full_s
        return held_s + self.other_wait_s

    @property
    def running(self) -> float:
        """The mean number of running requests."""
        return self.running_s / self.seconds if self.seconds else 0.0

    @property
    def hit_share(self) -> float | None:
        """The share of looked-up prompt tokens that the prefix cache had."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else None

    @property
    def accepted_share(self) -> float | None:
        """Accepted tokens per draft of speculative decoding."""
        return self.accepted / self.drafts if self.drafts else None


# What held the queue; from KV on, the index of its seconds among those of `sums_of`.
NOTHING, KV, DEFERRED, CAP, BUDGET, OTHER = -1, 0, 1, 2, 3, 4


def waits_for(at: Slice, limits: Limits) -> int:
    """What held the queue: NOTHING without a queue, OTHER if the reason is unknown."""
    if not at.waiting_capacity:
        return DEFERRED if at.waiting_deferred else NOTHING
    if at.kv_usage >= KV_FULL or at.preempted:
        return KV
    if limits.running is not None and at.running >= AT_CAP * limits.running:
        return CAP
    tokens = at.prefill_tokens + at.decode_tokens
    if limits.step_tokens is not None and tokens >= BUDGET_FULL * limits.step_tokens * at.steps > 0:
        return BUDGET
    # Places and tokens are left, so vLLM waits for KV blocks: the next request needs many.
    left = limits.running is not None and limits.step_tokens is not None
    return KV if left and at.kv_usage >= KV_SHORT else OTHER


def sums_of(done: Slice, seconds: float, limits: Limits) -> tuple[float, ...]:
    """The fields of Activity after `seconds`, in their order, for one slice of so many seconds."""
    waits = [0.0] * 5
    held = waits_for(done, limits)
    if held != NOTHING:
        waits[held] = seconds
    return (
        done.steps,
        done.prefill_tokens,
        done.decode_tokens,
        done.preempted,
        done.running * seconds,
        *waits,
        done.running * waits[KV],
        done.running * waits[CAP],
        done.busy_s or 0.0,
        done.arrivals or float(done.prefill_tokens > 0),
        beyond_free(done.prefill_tokens, limits.step_tokens) if done.steps == 1 else 0.0,
        done.products,
        seconds if done.busy_s is None and done.steps else 0.0,
        *done[12:],
    )


# Of a longer interval between two samples nothing is known.
_MAX_INTERVAL_S = 60.0
_DEFERRED = "deferred"


def limits_of(sample: EngineSample) -> Limits:
    """The limits of the engine, as far as a sample has them."""
    return Limits(
        running=sample.fact(fact.MAX_RUNNING_REQUESTS.name),
        step_tokens=sample.fact(fact.MAX_STEP_TOKENS.name),
    )


def slices_between(before: EngineSample | None, after: EngineSample) -> Iterator[Slice]:
    """The two halves of the interval between two samples, each with the gauges of its sample.

    None after a restart of the engine, a counter reset or a long interval.
    """
    if before is None or not 0 < after.at - before.at <= _MAX_INTERVAL_S:
        return
    if before.process_started_at != after.process_started_at:
        return
    increases = _increases(before, after)
    if min(increases.values()) < 0:
        return
    finished = increases[fact.REQUESTS_FINISHED.name]
    increases[_STARTED] = _more_inside(before, after, finished, fact.REQUESTS_RUNNING)
    increases[_ARRIVALS] = _more_inside(
        before, after, finished, fact.REQUESTS_RUNNING, fact.REQUESTS_WAITING
    )
    middle = (before.at + after.at) / 2
    ends = ((before, before.at, middle), (after, middle, after.at))
    always_busy = _gauge(before, fact.REQUESTS_RUNNING) and _gauge(after, fact.REQUESTS_RUNNING)
    for sample, since, until in ends:
        yield _slice(sample, since, until, increases, bool(always_busy))


def shows_empty_queue(sample: EngineSample, done: Slice) -> bool:
    """Whether a slice ends at its sample, and the sample's gauges show that no request waits.

    The engine sets its gauges at the end of a step. So if it counted no step and requests run,
    the gauges are old. An engine that has no counter of steps is always believed.
    """
    if done.until < sample.at or done.waiting_capacity or done.waiting_deferred:
        return False
    return done.steps > 0 or not done.running or sample.fact(fact.STEPS.name) is None


_COUNTERS = (
    fact.STEPS,
    fact.STEP_TOKENS,
    fact.OUTPUT_TOKENS,
    fact.PREEMPTIONS,
    fact.REQUESTS_FINISHED,
    fact.PREFIX_CACHE_HIT_TOKENS,
    fact.PREFIX_CACHE_QUERY_TOKENS,
    fact.SPEC_DECODE_DRAFTS,
    fact.SPEC_DECODE_ACCEPTED_TOKENS,
    fact.ADMISSION_REJECTIONS,
)


def _slice(
    sample: EngineSample, since: float, until: float, increases: dict[str, float], busy: bool
) -> Slice:
    half = {name: value / 2 for name, value in increases.items()}
    generated = half[fact.OUTPUT_TOKENS.name]
    deferred = sample.fact(fact.REQUESTS_WAITING_BY_REASON.name, _DEFERRED) or 0.0
    return Slice(
        since=since,
        until=until,
        steps=half[fact.STEPS.name],
        prefill_tokens=max(0.0, half[fact.STEP_TOKENS.name] - generated),
        decode_tokens=generated,
        running=_gauge(sample, fact.REQUESTS_RUNNING),
        waiting_capacity=_gauge(sample, fact.REQUESTS_WAITING) - deferred,
        waiting_deferred=deferred,
        kv_usage=_gauge(sample, fact.KV_CACHE_USAGE),
        preempted=half[fact.PREEMPTIONS.name],
        busy_s=until - since if busy else None,
        arrivals=half[_ARRIVALS],
        started=half[_STARTED],
        hit_tokens=half[fact.PREFIX_CACHE_HIT_TOKENS.name],
        query_tokens=half[fact.PREFIX_CACHE_QUERY_TOKENS.name],
        drafts=half[fact.SPEC_DECODE_DRAFTS.name],
        accepted=half[fact.SPEC_DECODE_ACCEPTED_TOKENS.name],
        rejected=half[fact.ADMISSION_REJECTIONS.name],
    )


_ARRIVALS, _STARTED = "arrivals", "started"


def _more_inside(
    before: EngineSample, after: EngineSample, finished: float, *gauges: Metric
) -> float:
    """Requests that came to what these gauges count: those that finished, and the increase."""
    inside = [sum(_gauge(sample, gauge) for gauge in gauges) for sample in (before, after)]
    return max(0.0, finished + inside[1] - inside[0])


def _gauge(sample: EngineSample, metric: Metric) -> float:
    """A gauge; 0 if the engine does not have it: with 0, no rule finds evidence."""
    return sample.fact(metric.name) or 0.0


def _increases(before: EngineSample, after: EngineSample) -> dict[str, float]:
    """The increase of each counter, over all its labels; below 0 after a counter reset."""
    increases = dict.fromkeys((metric.name for metric in _COUNTERS), 0.0)
    for sample, sign in ((before, -1.0), (after, 1.0)):
        for (name, _), value in sample.facts.items():
            if name in increases:
                increases[name] += sign * value
    return increases
