"""GPU_FAULT: which reports of a GPU's driver are faults of the GPU, and with what confidence."""

from collections.abc import Iterator, Mapping

from agent.analysis.failures.compared_poll import ComparedPoll
from agent.analysis.failures.findings import EXPLAINS, Findings, Ongoing
from agent.analysis.failures.poll import DetectionLimits, Evidence, Poll
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
                evidence: Evidence = {"xid": float(xid.xid), "meaning": _in_words(xid)}
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
    """Xids that may explain a death, in words: faults of GPUs and errors of a program on one."""
    for xid in poll.xids:
        if xid.xid not in _HARMLESS and known_xid(xid.xid).grade in _EXPLAIN_DEATHS:
            yield _in_words(xid)


def _in_words(xid: XidError) -> str:
    return f"{xid.gpu}: Xid {xid.xid}, {known_xid(xid.xid).meaning}"
