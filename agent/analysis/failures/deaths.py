"""Whether an engine is out of reach or dead, and why it died: outages, kills and deaths.

An engine dies of the first cause, in a fixed order, that has evidence. A kill by the kernel comes
first, then CUDA's out-of-memory error, then settings that need more memory than there is, then a
fault of a GPU, then a kill that may have hit another process of the engine's cgroup. Without any of
these the event is ENGINE_DEAD.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from agent.analysis.failures.poll import (
    EXPLAINS,
    HEALTHY,
    NO_CONNECTION,
    UNHEALTHY,
    ComparedPoll,
    DetectionLimits,
    Evidence,
    Findings,
    Ongoing,
    Outage,
    Poll,
)
from agent.analysis.failures.progress import reported
from agent.catalog.failure_lines import SAY_THAT_THEY_END, UNHEALTHY_ONLY_WHEN_DEAD, LineMeaning
from agent.catalog.gpu_problems import LOST
from agent.records.engine import CgroupMemory, ProcessRole
from agent.records.event import Confidence, Event, EventKind

_CONFIDENCES = (Confidence.SUSPECTED, Confidence.PROBABLE, Confidence.CERTAIN)
# An engine may take so long to change its number of ranks.
_RESCALING_TAKES_S = 600.0


@dataclass(frozen=True, slots=True)
class _DeathEvidence:
    """One piece of evidence of a death. A `firm` one lasts through polls without evidence."""

    confidence: Confidence
    firm: bool


class OutageDetector:
    """Finds the outage of the engine. `DeathDetector` reports why the engine died."""

    def __init__(self, limits: DetectionLimits) -> None:
        self._limits = limits
        self._healthy = False
        self._polls_since_line: int | None = None
        self._front_ended = False

    def observe(self, seen: ComparedPoll, found: Findings) -> tuple[Event, ...]:
        """Find the outage that lasts after this poll."""
        found.outage = self._outage(seen, stopped=found.stop_line is not None)
        self._remember(seen)
        return ()

    def _outage(self, seen: ComparedPoll, *, stopped: bool) -> Outage | None:
        outage = None if _is_back(seen) else seen.outage
        new = Outage(since_s=seen.poll.clock_s)
        if seen.poll.unreachable:
            outage = replace(outage or new, unreachable=True)
        deaths = [] if stopped else list(self._deaths(seen))
        if deaths:
            return self._with_deaths(outage or new, deaths, seen)
        return _without_deaths(outage) if outage else None

    def _deaths(self, seen: ComparedPoll) -> Iterator[_DeathEvidence]:
        if seen.death_line:
            yield _DeathEvidence(Confidence.CERTAIN, firm=True)
        # The health of a restarted engine says nothing about the one before.
        if seen.poll.health == UNHEALTHY and seen.restart is None:
            yield from self._by_health(seen)
        if seen.front_alive is False:
            yield from _by_lost_front(seen)
        # A new front has no core yet.
        if seen.front_alive is True and seen.core_alive is False and not seen.starts:
            yield _DeathEvidence(Confidence.PROBABLE, firm=False)
        yield from self._by_silent_log(seen)

    def _by_health(self, seen: ComparedPoll) -> Iterator[_DeathEvidence]:
        sample = seen.poll.sample or seen.before
        if sample is None or sample.dialect not in UNHEALTHY_ONLY_WHEN_DEAD:
            # An engine that finishes its requests before it stops changes some facts.
            now, then = seen.poll.sample, seen.before
            if self._healthy and now and then and reported(now) == reported(then):
                yield _DeathEvidence(Confidence.SUSPECTED, firm=False)
            return
        if not self._healthy and seen.poll.sample is None:
            return
        gone = seen.front_alive is False or seen.core_alive is False
        # A vLLM that changes its number of ranks answers everything with 503, its metrics too
        # (`entrypoints/serve/elastic_ep/middleware.py`). The front of a dead one serves metrics.
        if gone or not seen.poll.unreachable:
            yield _DeathEvidence(Confidence.PROBABLE, firm=True)
        elif seen.outage and seen.poll.clock_s - seen.outage.since_s > _RESCALING_TAKES_S:
            yield _DeathEvidence(Confidence.SUSPECTED, firm=False)

    def _by_silent_log(self, seen: ComparedPoll) -> Iterator[_DeathEvidence]:
        """A killed engine logs nothing, a normal stop would be logged."""
        logs_ends = seen.before is not None and seen.before.dialect in SAY_THAT_THEY_END
        if not logs_ends or not self._log_active() or self._front_ended:
            return
        if seen.poll.failure == NO_CONNECTION and seen.poll.host and seen.poll.host.log:
            if seen.front_alive is False:
                yield _DeathEvidence(Confidence.PROBABLE, firm=False)
            elif seen.front_alive is None:
                yield _DeathEvidence(Confidence.SUSPECTED, firm=False)

    def _log_active(self) -> bool:
        """Whether the log had a line at one of the last two polls that the engine answered.

        A log that holds a line for each response to the agent would hold a stop, too. An engine
        on a busy machine may write the line of one poll only after the agent has read the log.
        """
        return self._polls_since_line is not None and self._polls_since_line <= 1

    def _with_deaths(
        self, outage: Outage, deaths: Sequence[_DeathEvidence], seen: ComparedPoll
    ) -> Outage:
        failed = any(seen.poll.lines(LineMeaning.START_FAILED))
        named_ago_s = seen.poll.clock_s - outage.named_s
        if failed and outage.cause is not None and named_ago_s > self._limits.clue_s:
            # Another start failed after the death that was reported.
            outage = replace(outage, cause=None, dead=None, firm=False, evidence={})
        confidence = max((death.confidence for death in deaths), key=_CONFIDENCES.index)
        firm = any(death.firm for death in deaths)
        if outage.dead is None:
            return replace(outage, dead=confidence, firm=firm, polls_dead=0, at_start=failed)
        # Neither a stop nor a passing fault gives firm evidence twice.
        if firm and outage.firm:
            confidence = Confidence.CERTAIN
        return replace(
            outage,
            dead=max(confidence, outage.dead, key=_CONFIDENCES.index),
            firm=firm or outage.firm,
            polls_dead=outage.polls_dead + 1,
            at_start=outage.at_start or failed,
        )

    def _remember(self, seen: ComparedPoll) -> None:
        poll = seen.poll
        was_healthy = self._healthy and seen.restart is None
        self._healthy = poll.failure != NO_CONNECTION and (was_healthy or poll.health == HEALTHY)
        if poll.sample is not None and poll.host is not None and poll.host.log is not None:
            if poll.host.log.lines:
                self._polls_since_line = 0
            elif self._polls_since_line is not None:
                self._polls_since_line += 1
        self._front_ended = self._front_ended or any(poll.lines(LineMeaning.FRONT_ENDED))
        if seen.restart:
            self._polls_since_line, self._front_ended = None, False


def _is_back(seen: ComparedPoll) -> bool:
    """Whether the engine is well again after an outage, without a restart."""
    if seen.outage is None or seen.poll.sample is None or seen.restart or seen.death_line:
        return False
    return seen.well or (seen.poll.health is None and seen.outage.unreachable)


def _by_lost_front(seen: ComparedPoll) -> Iterator[_DeathEvidence]:
    """In a normal stop the front ends last, but a worker may end a moment after its core."""
    if seen.core_alive:
        yield _DeathEvidence(Confidence.PROBABLE, firm=True)
    elif any(process.role is ProcessRole.WORKER for process in seen.poll.processes or ()):
        yield _DeathEvidence(Confidence.PROBABLE, firm=False)


def _without_deaths(outage: Outage) -> Outage | None:
    """The outage after a poll without evidence of a death: only a firm death lasts."""
    if outage.firm:
        return replace(outage, polls_dead=outage.polls_dead + 1)
    return replace(outage, dead=None) if outage.unreachable else None


@dataclass(frozen=True, slots=True)
class _DeathCause:
    """A cause of a death. `reported` is whether an earlier event of this kind reported it."""

    kind: EventKind
    confidence: Confidence
    evidence: Evidence = field(default_factory=dict)
    reported: bool = False


class DeathDetector:
    """Reports each death once, as an event of the kind of its cause."""

    def __init__(self) -> None:
        self._node_kills: int | None = None
        self._polls_since_node_kill: int | None = None

    def observe(self, seen: ComparedPoll, found: Findings) -> Iterator[Event]:
        """The death whose cause is known with this poll. Adds the cause to the outage."""
        self._count_node_kills(seen.poll)
        outage = found.outage
        if outage is None or outage.cause is not None or found.stop_line:
            return
        refused = seen.poll.failure == NO_CONNECTION and seen.front_alive is not True
        if outage.dead is None and not refused:
            return
        at_start: Evidence = {"at_start": 1.0} if outage.at_start else {}
        evidence = {**death_evidence(seen, found), **at_start, **outage.evidence}
        # The first evidence is nearest to the death.
        found.outage = outage = replace(outage, evidence=evidence)
        if seen.well:
            # It may have died after its health check; the next poll shows it.
            return
        cause = next(self._causes(seen, found, outage), None)
        if cause is None:
            return
        found.explain_outage(cause.kind, seen.poll.clock_s)
        if not cause.reported:
            evidence = {**evidence, **cause.evidence}
            yield seen.poll.event(cause.kind, cause.confidence, evidence)

    def _causes(self, seen: ComparedPoll, found: Findings, outage: Outage) -> Iterator[_DeathCause]:
        """Every cause that has evidence, in the order in which they are tried."""
        if found.killed:
            yield _DeathCause(EventKind.HOST_OOM, Confidence.CERTAIN, reported=True)
        if self._killed_on_node(seen):
            sure = Confidence.SUSPECTED if outage.dead is None else Confidence.PROBABLE
            yield _DeathCause(EventKind.HOST_OOM, sure, {"node_oom_kills": self._node_kills})
        yield from _by_lines_or_gpu(found, outage)
        if outage.dead is None:
            return
        if found.killed_near:
            yield _DeathCause(EventKind.HOST_OOM, Confidence.PROBABLE)
        # Evidence of the cause may come a poll after the death.
        if outage.polls_dead or seen.restart:
            yield _DeathCause(EventKind.ENGINE_DEAD, outage.dead)

    def _killed_on_node(self, seen: ComparedPoll) -> bool:
        """Whether a process of the machine was killed when an engine without a cgroup was lost.

        A cgroup ends with its container, and its count of kills with it.
        """
        polls_ago = self._polls_since_node_kill
        recent = polls_ago is not None and polls_ago <= 1
        return recent and seen.poll.counting_cgroup is None and seen.front_alive is False

    def _count_node_kills(self, poll: Poll) -> None:
        before, now = self._node_kills, poll.host.node_oom_kills if poll.host else None
        if self._polls_since_node_kill is not None:
            self._polls_since_node_kill += 1
        if now is not None:
            self._node_kills = now
            if before is not None and now > before:
                self._polls_since_node_kill = 0


def _by_lines_or_gpu(found: Findings, outage: Outage) -> Iterator[_DeathCause]:
    if line := found.lines.get(LineMeaning.CUDA_OOM):
        yield _DeathCause(EventKind.CUDA_OOM, Confidence.CERTAIN, {"cause_line": line})
    if outage.at_start and (line := found.lines.get(LineMeaning.SIZING_ERROR)):
        yield _DeathCause(EventKind.SIZING_ERROR, Confidence.CERTAIN, {"cause_line": line})
    if found.gpu_fault:
        yield _DeathCause(EventKind.GPU_FAULT, Confidence.CERTAIN, reported=True)
    if line := found.lines.get(LineMeaning.GPU_FAULT):
        # Without a fault of the GPU, an error of the engine may give the same line.
        yield _DeathCause(EventKind.GPU_FAULT, Confidence.PROBABLE, {"cause_line": line})


def death_evidence(seen: ComparedPoll, found: Findings) -> Evidence:
    """The evidence of a death that this poll gives, over the figures of the last sample."""
    poll = seen.poll
    lost = [f"{gpu}: {why}" for gpu, why in poll.gpu_problems.items() if why in LOST]
    exit_codes = [finding.exit_code for finding in poll.findings if finding.exit_code is not None]
    known: dict[str, str | float | None] = {
        "page": poll.failure,
        "health": poll.health,
        "processes_gone": ", ".join(seen.lost) or None,
        "log_line": seen.death_line,
        "exit_code": exit_codes[-1] if exit_codes else None,
        "last_scheduler_stats": found.lines.get(LineMeaning.LAST_STATS),
        "xids": ", ".join(f"{xid.gpu}: {xid.xid}" for xid in poll.xids) or None,
        "gpus_lost": ", ".join(lost) or None,
        **poll.gpu_figures,
    }
    if seen.cgroup:
        known |= {
            "cgroup": seen.cgroup.path,
            "cgroup_oom_kills": seen.cgroup.oom_kills,
            "memory_usage_bytes": seen.cgroup.usage_bytes,
            "memory_limit_bytes": seen.cgroup.limit_bytes,
        }
    return seen.last_figures() | {name: value for name, value in known.items() if value is not None}


# Keys of kills that hit the engine, and of kills that may have hit another process of the cgroup.
_HIT = "hit"
_NEAR = "near"


class KillDetector:
    """Reports kills once for each try to start: at once if the engine lost a process.

    Otherwise it waits for the next poll, because a big process takes a while to end.
    """

    def __init__(self, limits: DetectionLimits) -> None:
        self._limits = limits
        self._ongoing = Ongoing(limits.quiet_s)
        self._cgroup: CgroupMemory | None = None
        self._waiting = 0

    def observe(self, seen: ComparedPoll, found: Findings) -> Iterator[Event]:
        """The kill that begins with this poll. Finds whether a recent kill explains a death."""
        now_s = seen.poll.clock_s
        if seen.started:
            # Another try to start: a kill from now on is another event.
            self._ongoing.end(_HIT, _NEAR)
        yield from self._kill(seen, found)
        found.killed = self._ongoing.lately(EXPLAINS, now_s, self._limits.clue_s)
        found.killed_near = self._ongoing.lately(_NEAR, now_s, self._limits.clue_s)
        if seen.restart:
            self._ongoing.end(_HIT, _NEAR, EXPLAINS)

    def _kill(self, seen: ComparedPoll, found: Findings) -> Iterator[Event]:
        waited, now_s = self._waiting, seen.poll.clock_s
        kills = waited + self._new_kills(seen.cgroup)
        died = bool(seen.lost) or found.dead is not None
        self._waiting = 0 if died or waited else kills
        if not kills or self._waiting:
            return
        if died:
            found.explain_outage(EventKind.HOST_OOM, now_s)
            self._ongoing.begins(EXPLAINS, now_s)
        if self._ongoing.begins(_HIT if died else _NEAR, now_s):
            # If the engine's processes live, the kill hit another process of the same cgroup.
            near = Confidence.PROBABLE if seen.front_alive is None else Confidence.SUSPECTED
            victims = {"kills": float(kills), "victims": ", ".join(seen.lost) or None}
            evidence = {**death_evidence(seen, found), **victims}
            yield seen.poll.event(
                EventKind.HOST_OOM, Confidence.CERTAIN if died else near, evidence
            )

    def _new_kills(self, cgroup: CgroupMemory | None) -> int:
        before, self._cgroup = self._cgroup, cgroup
        if before is None or cgroup is None or before.inode != cgroup.inode:
            return 0
        return max((cgroup.oom_kills or 0) - (before.oom_kills or 0), 0)
