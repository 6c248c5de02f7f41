"""What goes on for a while and is told of once: want of KV cache, refusals, sleep, Xids."""

from collections.abc import Iterator

from agent.analysis.failures.beats import sleeps
from agent.analysis.failures.gpus import GPU_FAULT_KEY, gpu_faults
from agent.analysis.failures.pauses import pause_noted, throws_back
from agent.analysis.failures.poll import DetectionLimits, Evidence, Poll
from agent.analysis.failures.signs import Signs
from agent.analysis.failures.state import Active, Key, Watching
from agent.catalog.engine_facts import (
    ADMISSION_REJECTIONS,
    KV_CACHE_USAGE,
    PREEMPTIONS,
    REQUESTS_WAITING,
    REQUESTS_WAITING_BY_REASON,
)
from agent.records.engine import EngineSample
from agent.records.event import Confidence, Event, EventKind

# vLLM's word for requests that wait for room in the KV cache (`v1/metrics/loggers.py`).
_FOR_CAPACITY = "capacity"


def pressures_after(
    poll: Poll, before: Watching, signs: Signs, limits: DetectionLimits
) -> tuple[tuple[Event, ...], Active]:
    """The events of what begins with this poll, and everything that goes on after it."""
    going_on = {
        key: at_s for key, at_s in before.active.items() if signs.clock_s - at_s < limits.quiet_s
    }
    events = []
    for key, event in _seen(poll, before, signs, limits):
        if key not in going_on:
            events.append(event)
            if _explains_death(event):
                going_on[GPU_FAULT_KEY] = signs.clock_s
        going_on[key] = signs.clock_s
    return tuple(events), going_on


def _explains_death(event: Event) -> bool:
    """Only when it begins: what a GPU lacks for long is not what an engine died of just now."""
    return event.kind is EventKind.GPU_FAULT and event.confidence is not Confidence.SUSPECTED


def sleep_begun(poll: Poll, before: Watching) -> tuple[Event, ...]:
    """The event of an engine that went to sleep."""
    if poll.sample is None or before.asleep or not sleeps(poll.sample):
        return ()
    return (poll.event(EventKind.SLEEP, Confidence.CERTAIN, before.last_figures()),)


def _seen(
    poll: Poll, before: Watching, signs: Signs, limits: DetectionLimits
) -> Iterator[tuple[Key, Event]]:
    yield from gpu_faults(poll, before, limits)
    # What was counted before this watch began may be long past.
    if poll.sample is not None and before.sample is not None and before.sample_s is not None:
        earlier = None if signs.restart else before.sample
        if not throws_back(signs.pause):
            yield from _preempted(poll, poll.sample, earlier, pause_noted(signs.pause))
        yield from _refused(poll, poll.sample, earlier)


def _preempted(
    poll: Poll, now: EngineSample, before: EngineSample | None, noted: Evidence
) -> Iterator[tuple[Key, Event]]:
    preemptions = _grown(now, before, (PREEMPTIONS.name, ()))
    if preemptions > 0:
        evidence = {
            "preemptions": preemptions,
            "kv_cache_usage": now.fact(KV_CACHE_USAGE.name),
            "requests_waiting": now.fact(REQUESTS_WAITING.name),
            "requests_waiting_for_capacity": now.fact(
                REQUESTS_WAITING_BY_REASON.name, _FOR_CAPACITY
            ),
            **noted,
        }
        yield _certain(poll, EventKind.KV_PRESSURE, evidence)


def _refused(
    poll: Poll, now: EngineSample, before: EngineSample | None
) -> Iterator[tuple[Key, Event]]:
    refused = {
        "_".join(("refused", *labels)): _grown(now, before, (name, labels))
        for name, labels in now.facts
        if name == ADMISSION_REJECTIONS.name
    }
    if any(grown > 0 for grown in refused.values()):
        waiting = {"requests_waiting": now.fact(REQUESTS_WAITING.name)}
        yield _certain(poll, EventKind.ADMISSION_LIMIT, {**refused, **waiting})


def _certain(poll: Poll, kind: EventKind, evidence: Evidence) -> tuple[Key, Event]:
    return (kind.value,), poll.event(kind, Confidence.CERTAIN, evidence)


def _grown(
    now: EngineSample, before: EngineSample | None, counter: tuple[str, tuple[str, ...]]
) -> float:
    """How much a counter grew since the sample before, or else since it was zero.

    Less than zero where a data-parallel rank took its counts along.
    """
    value = now.facts.get(counter, 0.0)
    return value if before is None else value - before.facts.get(counter, 0.0)
