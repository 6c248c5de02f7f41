"""The table of all failure detectors, the simple detectors, and the class that runs all of them."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from agent.analysis.failures.deaths import DeathDetector, KillDetector, OutageDetector
from agent.analysis.failures.hangs import HangDetector
from agent.analysis.failures.poll import (
    ComparedPoll,
    DetectionLimits,
    Evidence,
    Findings,
    Ongoing,
    Outage,
    Poll,
    PollHistory,
)
from agent.analysis.failures.progress import sleeps
from agent.analysis.failures.reported_faults import (
    GpuFaultDetector,
    LineDetector,
    PauseDetector,
    StopDetector,
)
from agent.analysis.failures.states import StateDetector
from agent.catalog.engine_facts import (
    ADMISSION_REJECTIONS,
    KV_CACHE_USAGE,
    PREEMPTIONS,
    REQUESTS_WAITING,
    REQUESTS_WAITING_BY_REASON,
)
from agent.records.engine import EngineSample, EngineStatus
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
    preempted = _increase(now, before, (PREEMPTIONS.name, ()))
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
        "_".join(("refused", *labels)): _increase(now, before, (name, labels))
        for name, labels in now.facts
        if name == ADMISSION_REJECTIONS.name
    }
    if any(increase > 0 for increase in rejected.values()):
        yield EventKind.ADMISSION_LIMIT, {**rejected, **waiting}


def _increase(
    now: EngineSample, before: EngineSample | None, counter: tuple[str, tuple[str, ...]]
) -> float:
    """The increase of a counter since the sample before, or since zero without one.

    Negative if a data-parallel rank left and took its counts along.
    """
    value = now.facts.get(counter, 0.0)
    return value if before is None else value - before.facts.get(counter, 0.0)


class UnreachableDetector:
    """Reports that an engine that was reachable is not, once for each outage."""

    def observe(self, seen: ComparedPoll, found: Findings) -> Iterator[Event]:
        """The outage that begins with this poll."""
        if not seen.poll.unreachable or not seen.reachable:
            return
        evidence = {
            "reason": seen.poll.failure,
            **seen.last_figures(),
            "stop_line": found.stop_line,
            "cause": found.cause,
        }
        yield seen.poll.event(EventKind.UNREACHABLE, Confidence.CERTAIN, evidence)


class RestartDetector:
    """Reports that the engine restarted, and for how long it was gone."""

    def observe(self, seen: ComparedPoll, found: Findings) -> Iterator[Event]:
        """The restart that this poll shows."""
        if seen.restart is None or seen.poll.sample is None:
            return
        # An engine that no poll missed was gone for no longer than between two samples.
        gone_since_s = seen.outage.since_s if seen.outage else seen.before_s
        evidence = {
            **seen.last_figures(),
            "new_process_started_at": seen.poll.sample.process_started_at,
            "gone_s": None if gone_since_s is None else seen.poll.clock_s - gone_since_s,
            "stop_line": found.stop_line,
            "cause": found.cause,
        }
        yield seen.poll.event(EventKind.RESTART, seen.restart, evidence)


_USUAL_LIMITS = DetectionLimits()
_WORST_FIRST = tuple(EventKind)


class Detector(Protocol):
    """Finds one kind of failure, and remembers what it needs from poll to poll."""

    def observe(self, seen: ComparedPoll, found: Findings) -> Iterable[Event]:
        """The events that begin with this poll. Writes its findings for later detectors."""


def _detectors(limits: DetectionLimits) -> tuple[Detector, ...]:
    """All detectors of one engine. Each uses the findings of those above it."""
    return (
        # detector                    finds                    reports
        LineDetector(limits),       # lines                    -
        PauseDetector(),            # pause                    -
        StopDetector(),             # stop_line                -
        OutageDetector(limits),     # outage                   -
        GpuFaultDetector(limits),   # gpu_fault                GPU_FAULT
        KillDetector(limits),       # killed, outage's cause   HOST_OOM
        DeathDetector(),            # outage's cause           any of the first five kinds
        HangDetector(limits),       # hangs                    HANG
        PressureDetector(limits),   # -                        KV_PRESSURE, ADMISSION_LIMIT
        SleepDetector(),            # -                        SLEEP
        RestartDetector(),          # -                        RESTART
        UnreachableDetector(),      # -                        UNREACHABLE
        StateDetector(limits),      # status                   -
    )  # fmt: skip


class FailureDetection:
    """Judges the polls of one engine, in their order, and remembers what its detectors need."""

    def __init__(
        self, limits: DetectionLimits = _USUAL_LIMITS, before: EngineSample | None = None
    ) -> None:
        """`before` is the last sample that an earlier run of the agent stored."""
        self._detectors = _detectors(limits)
        self._history = PollHistory(before)
        self._outage: Outage | None = None
        self._status: EngineStatus | None = None

    @property
    def status(self) -> EngineStatus | None:
        """The state of the engine after the last poll; None before the first."""
        return self._status

    def observe(self, poll: Poll) -> tuple[Event, ...]:
        """The events that begin with this poll, worst first; each condition is reported once."""
        seen, found = self._history.compare(poll, self._outage), Findings()
        events = [event for each in self._detectors for event in each.observe(seen, found)]
        self._history.add(seen)
        self._outage = None if seen.restart else found.outage
        self._status = found.status
        return tuple(sorted(events, key=lambda event: _WORST_FIRST.index(event.kind)))
