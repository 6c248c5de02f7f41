"""What a GPU's driver and the engine's log report: faults of GPUs, lines, pauses and stops.

The detectors of log lines report no events. The detectors after them use their findings.
"""

from collections.abc import Iterator, Mapping

from agent.analysis.failures.poll import (
    EXPLAINS,
    ComparedPoll,
    DetectionLimits,
    Evidence,
    Findings,
    Ongoing,
    Poll,
)
from agent.analysis.failures.progress import stepped, takes_work
from agent.catalog.failure_lines import LineMeaning
from agent.catalog.gpu_problems import HELD, LOST, XidGrade, known_xid
from agent.records.event import Confidence, Event, EventKind
from agent.records.gpu import XidError

_FAULT_GRADES = {
    XidGrade.CRITICAL: Confidence.CERTAIN,
    XidGrade.WARNING: Confidence.CERTAIN,
    None: Confidence.PROBABLE,
}
_EXPLAIN_DEATHS = {*_FAULT_GRADES, XidGrade.APPLICATION}
# What a driver asks for to recover a GPU (NVML, `nvmlDeviceGpuRecoveryAction_t`, less 5, which is
# about machines that share their memory).
_RECOVERIES: Mapping[float, str] = {
    1: "reset",
    2: "reboot",
    3: "drain",
    4: "drain and reset",
    6: "bus reset",
    7: "system reboot",
}
# NVIDIA advises to ignore these: they follow an error of the program, or record a repair that
# waits for the next reset.
_HARMLESS = frozenset({43, 63})


class GpuFaultDetector:
    """Reports Xids, lost GPUs and recovery actions that drivers ask for, once each."""

    def __init__(self, limits: DetectionLimits) -> None:
        self._limits = limits
        self._ongoing = Ongoing(limits.quiet_s)
        self._held_since_s: Mapping[str, float] = {}

    def observe(self, seen: ComparedPoll, found: Findings) -> Iterator[Event]:
        """The faults that begin with this poll. Finds whether a recent fault explains a death."""
        now_s = seen.poll.clock_s
        self._held_since_s = {
            gpu: self._held_since_s.get(gpu, now_s)
            for gpu, problem in seen.poll.gpu_problems.items()
            if problem in HELD
        }
        for key, event in self._faults(seen):
            if self._ongoing.begins(key, now_s):
                if event.confidence is not Confidence.SUSPECTED:
                    # A fault that lasts explains only a death soon after it began.
                    self._ongoing.begins(EXPLAINS, now_s)
                yield event
        found.gpu_fault = self._ongoing.lately(EXPLAINS, now_s, self._limits.clue_s)
        if seen.restart:
            self._ongoing.end(EXPLAINS)

    def _faults(self, seen: ComparedPoll) -> Iterator[tuple[tuple[str, str], Event]]:
        """Every fault that the poll shows, with the key by which it is reported once."""
        poll, figures = seen.poll, seen.last_figures()

        def fault(gpu: str, confidence: Confidence, evidence: Evidence) -> Event:
            return poll.event(EventKind.GPU_FAULT, confidence, {**figures, **evidence}, gpu=gpu)

        for xid in poll.xids:
            confidence = _FAULT_GRADES.get(known_xid(xid.xid).grade)
            if confidence is not None and xid.xid not in _HARMLESS:
                evidence: Evidence = {"xid": float(xid.xid), "meaning": _xid_text(xid)}
                yield (xid.gpu, str(xid.xid)), fault(xid.gpu, confidence, evidence)
        for gpu, problem in poll.gpu_problems.items():
            if (loss := self._loss(gpu, problem, poll.clock_s)) is not None:
                # The reason word of one loss may change.
                yield (gpu, f"lost, {loss}"), fault(gpu, loss, {"problem": problem})
        for gpu, action in poll.recovery_actions.items():
            if (wanted := _RECOVERIES.get(action)) is not None:
                evidence = {"recovery_action": wanted}
                yield (gpu, wanted), fault(gpu, Confidence.PROBABLE, evidence)

    def _loss(self, gpu: str, problem: str, now_s: float) -> Confidence | None:
        """The confidence that a GPU is lost; None if only the agent cannot read it."""
        if problem in LOST:
            return Confidence.CERTAIN
        # A slow driver responds soon, and several polls may get the same sample of a GPU.
        held_s = now_s - self._held_since_s.get(gpu, now_s)
        return Confidence.SUSPECTED if held_s >= self._limits.held_s else None


def xids_with_deaths(poll: Poll) -> Iterator[str]:
    """Xids that may explain a death, as text: faults of GPUs and errors of a program on one."""
    for xid in poll.xids:
        if xid.xid not in _HARMLESS and known_xid(xid.xid).grade in _EXPLAIN_DEATHS:
            yield _xid_text(xid)


def _xid_text(xid: XidError) -> str:
    return f"{xid.gpu}: Xid {xid.xid}, {known_xid(xid.xid).meaning}"


_OF_PAUSES = (LineMeaning.PAUSED, LineMeaning.RESUMED)
# The log is read after the metrics, which may show what a pause did only at the next poll.
_PAUSE_SHOWS_POLLS_LATER = 2
# An engine that was ordered to stop finishes its requests first, for as long as it is allowed to
# (vLLM `--shutdown-timeout`). One that takes new requests after so long did not stop.
_STOP_TAKES_S = 600.0


class LineDetector:
    """Finds the recent lines of each meaning, and Xids as lines among them."""

    def __init__(self, limits: DetectionLimits) -> None:
        self._limits = limits
        self._lines: dict[LineMeaning, tuple[float, str]] = {}

    def observe(self, seen: ComparedPoll, found: Findings) -> tuple[Event, ...]:
        """Find the lines of the last `clue_s`."""
        now_s, oldest_s = seen.poll.clock_s, seen.poll.clock_s - self._limits.clue_s
        recent = {meaning: line for meaning, line in self._lines.items() if line[0] >= oldest_s}
        xids = [(LineMeaning.GPU_FAULT, xid) for xid in xids_with_deaths(seen.poll)]
        findings = [(finding.meaning, finding.line) for finding in seen.poll.findings]
        for meaning, line in xids + findings:
            # The first line is nearest to the cause.
            first = recent.get(meaning, (now_s, line))[1]
            recent[meaning] = (now_s, first)
        found.lines = {meaning: line for meaning, (_, line) in recent.items()}
        self._lines = {} if seen.restart else recent
        return ()


class PauseDetector:
    """Finds the last pause of the engine, which only its log shows.

    A paused engine keeps its requests: it neither hangs nor is it short of KV cache. When it
    pauses it may preempt requests, which its metrics show at the first step after the pause.
    """

    def __init__(self) -> None:
        self._at: float | None = None
        # Since the end of the pause; 0 while it lasts.
        self._polls_since = 0
        self._sample_read = False

    def observe(self, seen: ComparedPoll, found: Findings) -> tuple[Event, ...]:
        """Find whether the engine is paused, or was lately."""
        self._follow(seen)
        if self._at is not None:
            found.paused_at = {"paused_at": self._at}
            found.paused = self._polls_since == 0
            found.pause_shows = self._polls_since <= _PAUSE_SHOWS_POLLS_LATER
        if seen.restart:
            self._at = None
        return ()

    def _follow(self, seen: ComparedPoll) -> None:
        poll = seen.poll
        orders = [found.meaning for found in poll.findings if found.meaning in _OF_PAUSES]
        if orders and orders[-1] is LineMeaning.PAUSED:
            self._at, self._polls_since, self._sample_read = poll.at, 0, False
        elif orders:
            self._at, self._polls_since = poll.at if self._at is None else self._at, 1
        # The line that ends the pause may be missed. Steps between two samples that were both
        # read since the pause began end it as well.
        elif self._polls_since or (self._sample_read and stepped(seen.before, poll.sample)):
            self._polls_since += 1
        else:
            self._sample_read = self._sample_read or poll.sample is not None


class StopDetector:
    """Finds the line that says that the engine was ordered to stop.

    A front that is ordered to stop before anything went wrong stops the rest of the engine. A
    front that ends because its core died may log the same line, but after the death.
    """

    def __init__(self) -> None:
        self._line: str | None = None
        self._at_s = 0.0

    def observe(self, seen: ComparedPoll, found: Findings) -> tuple[Event, ...]:
        """Find the stop line, until the engine is back."""
        if self._line is not None and self._works_on(seen):
            self._line = None
        self._read(seen)
        found.stop_line = self._line
        back = seen.poll.sample is not None and not seen.reachable
        if seen.restart or back:
            self._line = None
        return ()

    def _read(self, seen: ComparedPoll) -> None:
        died = seen.outage is not None and seen.outage.firm
        for finding in seen.poll.findings:
            if finding.meaning is LineMeaning.STOPPING and not died and self._line is None:
                self._line, self._at_s = finding.line, seen.poll.clock_s
            died = died or finding.meaning in (LineMeaning.DEAD, LineMeaning.START_FAILED)
            if finding.meaning is LineMeaning.START_FAILED:
                # Another try to start followed the stop.
                self._line = None

    def _works_on(self, seen: ComparedPoll) -> bool:
        """Whether the engine takes new requests long after the order to stop."""
        if seen.poll.clock_s - self._at_s <= _STOP_TAKES_S or seen.poll.sample is None:
            return False
        return seen.responds and takes_work(seen.before, seen.poll.sample)
