"""Why an engine died: the first cause, in a fixed order, that has evidence.

A kill by the kernel comes first, then CUDA's out-of-memory error, then settings that need more
memory than there is, then a fault of a GPU, then a kill that may have hit another process of the
engine's cgroup. Without any of these the event is ENGINE_DEAD.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from agent.analysis.failures.compared_poll import ComparedPoll
from agent.analysis.failures.findings import Findings, Outage
from agent.analysis.failures.poll import NO_CONNECTION, Evidence, Poll
from agent.catalog.failure_lines import LineMeaning
from agent.catalog.gpu_problems import LOST
from agent.records.event import Confidence, Event, EventKind


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
