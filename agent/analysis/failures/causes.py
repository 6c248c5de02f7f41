"""Why an engine died: the first cause in a fixed order that the evidence bears out.

A kill by the kernel comes before CUDA's out-of-memory, that before a setting that cannot fit, that
before a fault of a GPU; an engine that died of none of them is merely dead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from agent.analysis.failures.deaths import noted
from agent.analysis.failures.evidence import of_death
from agent.analysis.failures.gpus import GPU_FAULT_KEY
from agent.analysis.failures.poll import NO_CONNECTION, DetectionLimits, Evidence, Poll
from agent.analysis.failures.signs import Signs
from agent.analysis.failures.state import Active, Key, Outage, Watching
from agent.catalog.failure_lines import LineMeaning
from agent.records.event import Confidence, Event, EventKind

# What kills in the engine's cgroup go on by: those that hit the engine, and those that may have
# hit a neighbour.
_HIT: Key = (EventKind.HOST_OOM.value,)
_NEAR: Key = (EventKind.HOST_OOM.value, "near")
_KILL_KEYS = frozenset({_HIT, _NEAR})
# A kill that hit explains the death that it led to, also when the next try has begun.
_EXPLAINS: Key = (EventKind.HOST_OOM.value, "explains")
# What explains a death explains none in the engine's next life.
CAUSE_KEYS = _KILL_KEYS | {_EXPLAINS, GPU_FAULT_KEY}


@dataclass(frozen=True, slots=True)
class Case:
    """All that may tell the cause of an outage."""

    poll: Poll
    before: Watching
    signs: Signs
    limits: DetectionLimits
    active: Active

    def lost(self, outage: Outage) -> bool:
        """Whether the engine is gone, be it dead or stopped."""
        refused = self.poll.failure == NO_CONNECTION and self.signs.front_alive is not True
        return outage.dead is not None or refused

    def told_lately(self, key: Key) -> bool:
        """Whether what this event tells of was seen so shortly before that it explains a death."""
        at_s = self.active.get(key)
        return at_s is not None and self.signs.clock_s - at_s <= self.limits.clue_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why an engine died; `told` is set where an event said so before."""

    kind: EventKind
    confidence: Confidence
    told: bool = False
    evidence: Evidence = field(default_factory=dict)


def _explained_by_kill(case: Case, outage: Outage) -> Cause | None:
    if not case.told_lately(_EXPLAINS):
        return None
    return Cause(kind=EventKind.HOST_OOM, confidence=Confidence.CERTAIN, told=True)


def _kill_was_near(case: Case, outage: Outage) -> Cause | None:
    """What was thought to have hit a neighbour, now that the engine died of nothing else."""
    if outage.dead is None or not case.told_lately(_NEAR):
        return None
    return Cause(kind=EventKind.HOST_OOM, confidence=Confidence.PROBABLE)


def _kill_on_node(case: Case, outage: Outage) -> Cause | None:
    """A kill somewhere on the machine, at the moment when an engine with no cgroup to ask is lost.

    A cgroup ends with its container, and takes its count of kills along.
    """
    polls_ago = case.signs.polls_since_node_kill
    host = case.poll.host
    cgroup_told = host is not None and host.cgroup is not None and host.cgroup.oom_kills is not None
    gone_from_here = case.signs.front_alive is False
    if polls_ago is None or polls_ago > 1 or cgroup_told or not gone_from_here:
        return None
    sure = Confidence.SUSPECTED if outage.dead is None else Confidence.PROBABLE
    evidence = {"node_oom_kills": case.signs.node_oom_kills}
    return Cause(kind=EventKind.HOST_OOM, confidence=sure, evidence=evidence)


def _cuda_oom(case: Case, outage: Outage) -> Cause | None:
    return _by_line(case, LineMeaning.CUDA_OOM, EventKind.CUDA_OOM, Confidence.CERTAIN)


def _sizing_error(case: Case, outage: Outage) -> Cause | None:
    if not outage.at_start:
        return None
    return _by_line(case, LineMeaning.SIZING_ERROR, EventKind.SIZING_ERROR, Confidence.CERTAIN)


def _explained_by_xid(case: Case, outage: Outage) -> Cause | None:
    if not case.told_lately(GPU_FAULT_KEY):
        return None
    return Cause(kind=EventKind.GPU_FAULT, confidence=Confidence.CERTAIN, told=True)


def _cuda_error(case: Case, outage: Outage) -> Cause | None:
    # Without an Xid of the GPU's own, a mistake of the engine's may look the same.
    return _by_line(case, LineMeaning.GPU_FAULT, EventKind.GPU_FAULT, Confidence.PROBABLE)


def _by_line(
    case: Case, meaning: LineMeaning, kind: EventKind, confidence: Confidence
) -> Cause | None:
    line = case.signs.clue(meaning)
    if line is None:
        return None
    return Cause(kind=kind, confidence=confidence, evidence={"cause_line": line})


def _no_cause(case: Case, outage: Outage) -> Cause | None:
    """Told at the second poll, as what explains a death may be seen a moment after it."""
    if outage.dead is None or not (outage.polls_dead or case.signs.restart):
        return None
    return Cause(kind=EventKind.ENGINE_DEAD, confidence=outage.dead)


_CAUSES: Sequence[Callable[[Case, Outage], Cause | None]] = (
    _explained_by_kill,
    _kill_on_node,
    _cuda_oom,
    _sizing_error,
    _explained_by_xid,
    _cuda_error,
    _kill_was_near,
    _no_cause,
)


def with_cause(case: Case, outage: Outage | None) -> tuple[tuple[Event, ...], Outage | None]:
    """The event that names why the engine died, once that can be said, and the outage with it."""
    if outage is None or outage.cause is not None:
        return (), outage
    if not case.lost(outage) or case.signs.stopping:
        return (), outage
    outage = noted(outage, case.poll, case.before, case.signs)
    if case.signs.well:
        # Whatever its log says; one that died since it was asked is not well at the next poll.
        return (), outage
    cause = next((cause for find in _CAUSES if (cause := find(case, outage))), None)
    if cause is None:
        return (), outage
    named = replace(outage, cause=cause.kind, named_s=case.signs.clock_s)
    if cause.told:
        return (), named
    evidence = {**outage.evidence, **cause.evidence}
    return (case.poll.event(cause.kind, cause.confidence, evidence),), named


@dataclass(frozen=True, slots=True)
class KillTold:
    """What came of kills: the event, those that none has told of yet, and what goes on.

    `hit` is whether the engine's own process was killed at this poll.
    """

    events: tuple[Event, ...]
    untold: int
    active: Active
    hit: bool = False

    def named(self, outage: Outage | None, clock_s: float) -> Outage | None:
        """The outage, whose cause is known once a kill hit the engine."""
        if outage is None or outage.cause is not None or not self.hit:
            return outage
        return replace(outage, cause=EventKind.HOST_OOM, named_s=clock_s)


def kill_told(
    poll: Poll, before: Watching, signs: Signs, outage: Outage | None, active: Active
) -> KillTold:
    """The event of a kill in the engine's cgroup.

    It is told of at once when the engine lost a process, and a poll later otherwise: a big process
    takes a while to go.
    """
    if signs.came:
        # Whatever was killed before, this is another try.
        active = {key: at_s for key, at_s in active.items() if key not in _KILL_KEYS}
    kills = before.kills_untold + signs.kills
    if not kills:
        return KillTold((), 0, active)
    died = bool(signs.lost) or (outage is not None and outage.dead is not None)
    if not died and not before.kills_untold:
        return KillTold((), kills, active)
    keys = (_HIT, _EXPLAINS) if died else (_NEAR,)
    evidence = {
        **of_death(poll, before, signs),
        "kills": float(kills),
        "victims": ", ".join(signs.lost) or None,
    }
    event = poll.event(EventKind.HOST_OOM, _sure(died, signs), evidence)
    events = () if keys[0] in active else (event,)
    return KillTold(events, 0, {**active, **dict.fromkeys(keys, signs.clock_s)}, hit=died)


def _sure(died: bool, signs: Signs) -> Confidence:
    if died:
        return Confidence.CERTAIN
    # All of the engine's processes live: the kernel took something else in the same cgroup.
    return Confidence.PROBABLE if signs.front_alive is None else Confidence.SUSPECTED
