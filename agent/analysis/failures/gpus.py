"""Which reports of a driver are faults of a GPU, and how sure that is."""

from collections.abc import Iterator

from agent.analysis.failures.poll import Poll
from agent.analysis.failures.state import Key, Watching
from agent.catalog.xids import XIDS, XidGrade
from agent.records.event import Confidence, Event, EventKind
from agent.records.gpu import XidSeen

# What shows that some GPU of the engine is at fault, whichever it is.
GPU_FAULT_KEY = (EventKind.GPU_FAULT.value,)

_FAULT_GRADES = {
    XidGrade.CRITICAL: Confidence.CERTAIN,
    XidGrade.WARNING: Confidence.CERTAIN,
    None: Confidence.PROBABLE,
}
# NVIDIA's advice for these is to ignore them: they follow an error of the program, and a repair
# that waits for the next reset.
_HARMLESS = frozenset({43, 63})


def gpu_faults(poll: Poll, before: Watching) -> Iterator[tuple[Key, Event | None]]:
    """The faults that a poll shows, each under the key that it goes on by."""
    for seen in poll.xids:
        if (sure := _fault(seen)) is not None:
            evidence = {**before.last_figures(), "xid": float(seen.xid), "meaning": xid_line(seen)}
            yield _faulty(poll, seen.gpu, str(seen.xid), sure, evidence)
            yield GPU_FAULT_KEY, None
    for gpu, problem in poll.gpu_problems.items():
        evidence = {**before.last_figures(), "problem": problem}
        yield _faulty(poll, gpu, problem, Confidence.CERTAIN, evidence)
        yield GPU_FAULT_KEY, None


def program_xids(poll: Poll) -> Iterator[str]:
    """Xids that say that a program went wrong on a GPU: no event, but what may explain a death."""
    for seen in poll.xids:
        if _grade(seen) is XidGrade.APPLICATION and seen.xid not in _HARMLESS:
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


def _grade(seen: XidSeen) -> XidGrade | None:
    known = XIDS.get(seen.xid)
    return None if known is None else known.grade
