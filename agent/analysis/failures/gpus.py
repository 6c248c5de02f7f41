"""Which reports of a driver are faults of a GPU, and how sure that is."""

from collections.abc import Iterator, Mapping

from agent.analysis.failures.poll import DetectionLimits, Poll
from agent.analysis.failures.state import Key, Watching
from agent.catalog.gpu_problems import HELD, LOST
from agent.catalog.xids import XIDS, XidGrade
from agent.records.event import Confidence, Event, EventKind
from agent.records.gpu import XidSeen

# That some GPU of the engine was told of as at fault, whichever it is.
GPU_FAULT_KEY = (EventKind.GPU_FAULT.value,)

_FAULT_GRADES = {
    XidGrade.CRITICAL: Confidence.CERTAIN,
    XidGrade.WARNING: Confidence.CERTAIN,
    None: Confidence.PROBABLE,
}
# What a driver asks for to make a GPU sound again (NVML, `nvmlDeviceGpuRecoveryAction_t`, less 5,
# which is about machines that share their memory).
_RECOVERIES: Mapping[float, str] = {
    1: "reset",
    2: "reboot",
    3: "drain",
    4: "drain and reset",
    6: "bus reset",
    7: "system reboot",
}
# NVIDIA's advice for these is to ignore them: they follow an error of the program, and a repair
# that waits for the next reset.
_HARMLESS = frozenset({43, 63})


def gpu_faults(
    poll: Poll, before: Watching, limits: DetectionLimits
) -> Iterator[tuple[Key, Event]]:
    """The faults that a poll shows, each under the key that it goes on by."""
    for seen in poll.xids:
        if (sure := _fault(seen)) is not None:
            evidence = {**before.last_figures(), "xid": float(seen.xid), "meaning": xid_line(seen)}
            yield _faulty(poll, seen.gpu, str(seen.xid), sure, evidence)
    for gpu, problem in poll.gpu_problems.items():
        if (loss := _loss(poll, gpu, before, limits)) is not None:
            evidence = {**before.last_figures(), "problem": problem}
            # One loss goes by several words, one after the other.
            yield _faulty(poll, gpu, f"lost, {loss}", loss, evidence)
    for gpu, action in poll.recovery_actions.items():
        if (wanted := _RECOVERIES.get(action)) is not None:
            evidence = {**before.last_figures(), "recovery_action": wanted}
            yield _faulty(poll, gpu, wanted, Confidence.PROBABLE, evidence)


def blamed_xids(poll: Poll) -> Iterator[str]:
    """Xids that may explain a death: faults of a GPU, and of a program that went wrong on one."""
    for seen in poll.xids:
        of_program = _grade(seen) is XidGrade.APPLICATION and seen.xid not in _HARMLESS
        if of_program or _fault(seen) is not None:
            yield xid_line(seen)


def xid_line(seen: XidSeen) -> str:
    """An Xid in words."""
    known = XIDS.get(seen.xid)
    return f"{seen.gpu}: Xid {seen.xid}, {known.meaning if known else 'of unknown meaning'}"


def _faulty(
    poll: Poll, gpu: str, what: str, sure: Confidence, evidence: dict[str, str | float | None]
) -> tuple[Key, Event]:
    event = poll.event(EventKind.GPU_FAULT, sure, evidence, gpu=gpu)
    return (EventKind.GPU_FAULT.value, gpu, what), event


def _fault(seen: XidSeen) -> Confidence | None:
    return None if seen.xid in _HARMLESS else _FAULT_GRADES.get(_grade(seen))


def held_since_s(poll: Poll, before: Watching) -> Mapping[str, float]:
    """Since when the driver holds its calls, by GPU."""
    return {
        gpu: before.gpus_held_since_s.get(gpu, poll.clock_s)
        for gpu, problem in poll.gpu_problems.items()
        if problem in HELD
    }


def _loss(poll: Poll, gpu: str, before: Watching, limits: DetectionLimits) -> Confidence | None:
    """How sure it is that a GPU is lost; None where it is the agent that cannot see it."""
    if poll.gpu_problems[gpu] in LOST:
        return Confidence.CERTAIN
    # A driver that only was slow answers soon, and several polls may see one reading of a GPU.
    since_s = held_since_s(poll, before).get(gpu, poll.clock_s)
    return Confidence.SUSPECTED if poll.clock_s - since_s >= limits.held_s else None


def _grade(seen: XidSeen) -> XidGrade | None:
    known = XIDS.get(seen.xid)
    return None if known is None else known.grade
