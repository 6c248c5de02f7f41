"""KV_PRESSURE, ADMISSION_LIMIT and SLEEP: states that an engine reports itself, each once."""

from collections.abc import Iterator

from agent.analysis.failures.compared_poll import ComparedPoll
from agent.analysis.failures.findings import Findings, Ongoing
from agent.analysis.failures.heartbeat import sleeps
from agent.analysis.failures.poll import DetectionLimits, Evidence
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


class PressureDetector:
    """Reports preemptions and rejected requests when they begin."""

    def __init__(self, limits: DetectionLimits) -> None:
        self._ongoing = Ongoing(limits.quiet_s)

    def observe(self, seen: ComparedPoll, found: Findings) -> Iterator[Event]:
        """The pressures that begin with this poll."""
        now = seen.poll.sample
        # What was counted before this agent's first sample may be long past.
        if now is None or seen.before is None or seen.before_s is None:
            return
        before = None if seen.restart else seen.before
        for kind, evidence in _pressures(now, before, found):
            if self._ongoing.begins(kind, seen.poll.clock_s):
                yield seen.poll.event(kind, Confidence.CERTAIN, evidence)


class SleepDetector:
    """Reports that an engine went to sleep."""

    def observe(self, seen: ComparedPoll, found: Findings) -> Iterator[Event]:
        """The sleep that begins with this poll."""
        if seen.poll.sample is not None and sleeps(seen.poll.sample) and not seen.slept:
            yield seen.poll.event(EventKind.SLEEP, Confidence.CERTAIN, seen.last_figures())


def _pressures(
    now: EngineSample, before: EngineSample | None, found: Findings
) -> Iterator[tuple[EventKind, Evidence]]:
    waiting = {"requests_waiting": now.fact(REQUESTS_WAITING.name)}
    preempted = _growth(now, before, (PREEMPTIONS.name, ()))
    # A pause may preempt requests.
    if preempted > 0 and not found.pause_shows:
        for_capacity = now.fact(REQUESTS_WAITING_BY_REASON.name, _FOR_CAPACITY)
        cache = {
            "preemptions": preempted,
            "kv_cache_usage": now.fact(KV_CACHE_USAGE.name),
            "requests_waiting_for_capacity": for_capacity,
        }
        yield EventKind.KV_PRESSURE, {**cache, **waiting, **found.paused_at}
    rejected = {
        "_".join(("refused", *labels)): _growth(now, before, (name, labels))
        for name, labels in now.facts
        if name == ADMISSION_REJECTIONS.name
    }
    if any(growth > 0 for growth in rejected.values()):
        yield EventKind.ADMISSION_LIMIT, {**rejected, **waiting}


def _growth(
    now: EngineSample, before: EngineSample | None, counter: tuple[str, tuple[str, ...]]
) -> float:
    """The increase of a counter since the sample before, or since zero without one.

    Negative where a data-parallel rank left and took its counts along.
    """
    value = now.facts.get(counter, 0.0)
    return value if before is None else value - before.facts.get(counter, 0.0)
