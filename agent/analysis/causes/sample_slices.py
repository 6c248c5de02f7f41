"""What an engine did between two samples of its exposition."""

from collections.abc import Iterator

from agent.analysis.causes.activity import Limits, Slice
from agent.catalog import engine_facts as fact
from agent.catalog.metric import Metric
from agent.records.engine import EngineSample

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
    grown = _grown(before, after)
    if min(grown.values()) < 0:
        return
    grown[_ARRIVALS] = _arrivals(before, after, grown[fact.REQUESTS_FINISHED.name])
    middle = (before.at + after.at) / 2
    ends = ((before, before.at, middle), (after, middle, after.at))
    always_busy = _gauge(before, fact.REQUESTS_RUNNING) and _gauge(after, fact.REQUESTS_RUNNING)
    for sample, since, until in ends:
        yield _slice(sample, since, until, grown, bool(always_busy))


def shows_empty_queue(sample: EngineSample, done: Slice) -> bool:
    """Whether a slice ends at its sample, and the sample's gauges show that no request waits.

    The engine sets its gauges at the end of a step. So where it counted no step and requests run,
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
    sample: EngineSample, since: float, until: float, grown: dict[str, float], busy: bool
) -> Slice:
    half = {name: value / 2 for name, value in grown.items()}
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
        hit_tokens=half[fact.PREFIX_CACHE_HIT_TOKENS.name],
        query_tokens=half[fact.PREFIX_CACHE_QUERY_TOKENS.name],
        drafts=half[fact.SPEC_DECODE_DRAFTS.name],
        accepted=half[fact.SPEC_DECODE_ACCEPTED_TOKENS.name],
        rejected=half[fact.ADMISSION_REJECTIONS.name],
    )


_ARRIVALS = "arrivals"


def _arrivals(before: EngineSample, after: EngineSample, finished: float) -> float:
    """Requests that came: those that finished, and the growth of those inside the engine."""
    inside = [
        _gauge(sample, fact.REQUESTS_RUNNING) + _gauge(sample, fact.REQUESTS_WAITING)
        for sample in (before, after)
    ]
    return max(0.0, finished + inside[1] - inside[0])


def _gauge(sample: EngineSample, metric: Metric) -> float:
    """A gauge; 0 where the engine does not have it: with 0, no rule finds evidence."""
    return sample.fact(metric.name) or 0.0


def _grown(before: EngineSample, after: EngineSample) -> dict[str, float]:
    """How much each counter grew, over all its labels; below 0 after a counter reset."""
    grown = dict.fromkeys((metric.name for metric in _COUNTERS), 0.0)
    for sample, sign in ((before, -1.0), (after, 1.0)):
        for (name, _), value in sample.facts.items():
            if name in grown:
                grown[name] += sign * value
    return grown
