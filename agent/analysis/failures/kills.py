"""HOST_OOM: the kernel killed a process in the engine's cgroup because memory ran out."""

from collections.abc import Iterator

from agent.analysis.failures.compared_poll import ComparedPoll
from agent.analysis.failures.deaths import death_evidence
from agent.analysis.failures.findings import EXPLAINS, Findings, Ongoing
from agent.analysis.failures.poll import DetectionLimits
from agent.records.event import Confidence, Event, EventKind
from agent.records.host import CgroupMemory

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
        """Kills that the same cgroup counted since the last poll."""
        before, self._cgroup = self._cgroup, cgroup
        if before is None or cgroup is None or before.inode != cgroup.inode:
            return 0
        return max((cgroup.oom_kills or 0) - (before.oom_kills or 0), 0)
