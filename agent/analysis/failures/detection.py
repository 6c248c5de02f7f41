"""The table of all failure detectors, and the class that runs it at every poll."""

from collections.abc import Iterable
from typing import Protocol

from agent.analysis.failures.compared_poll import ComparedPoll, PollHistory
from agent.analysis.failures.deaths import DeathDetector
from agent.analysis.failures.findings import Findings, Outage
from agent.analysis.failures.gpu_faults import GpuFaultDetector
from agent.analysis.failures.hangs import HangDetector
from agent.analysis.failures.kills import KillDetector
from agent.analysis.failures.log_lines import LineDetector, PauseDetector, StopDetector
from agent.analysis.failures.outages import OutageDetector
from agent.analysis.failures.poll import DetectionLimits, Poll
from agent.analysis.failures.pressures import PressureDetector, SleepDetector
from agent.analysis.failures.reachability import RestartDetector, UnreachableDetector
from agent.records.engine import EngineSample
from agent.records.event import Event, EventKind

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
        HangDetector(limits),       # -                        HANG
        PressureDetector(limits),   # -                        KV_PRESSURE, ADMISSION_LIMIT
        SleepDetector(),            # -                        SLEEP
        RestartDetector(),          # -                        RESTART
        UnreachableDetector(),      # -                        UNREACHABLE
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

    def observe(self, poll: Poll) -> tuple[Event, ...]:
        """The events that begin with this poll, worst first; each condition is reported once."""
        seen, found = self._history.compare(poll, self._outage), Findings()
        events = [event for each in self._detectors for event in each.observe(seen, found)]
        self._history.add(seen)
        self._outage = None if seen.restart else found.outage
        return tuple(sorted(events, key=lambda event: _WORST_FIRST.index(event.kind)))
