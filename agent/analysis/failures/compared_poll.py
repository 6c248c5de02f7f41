"""One poll compared with the polls before it: the input that all detectors share."""

from collections.abc import Iterable
from dataclasses import dataclass

from agent.analysis.failures.findings import Outage
from agent.analysis.failures.heartbeat import computes, moves, sleeps
from agent.analysis.failures.poll import HEALTHY, Poll
from agent.analysis.failures.restarts import key_figures, restart_between
from agent.catalog.failure_lines import LineMeaning
from agent.records.engine import EngineSample
from agent.records.event import Confidence
from agent.records.host import CgroupMemory, EngineProcess, ProcessRole

_ESSENTIAL = frozenset({ProcessRole.FRONT, ProcessRole.CORE, ProcessRole.WORKER})

Identities = frozenset[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPoll:
    """One poll compared with the polls before it. What is unknown is None.

    `before` is the last sample before this poll, read at `before_s`; that is None if an earlier
    run of the agent read it. `reachable` is whether the last poll reached the engine, `outage` the
    outage after the last poll. `restart` is the confidence that the engine restarted since.
    `processes_before` and `cgroup` are the last known ones.
    """

    poll: Poll
    elapsed_s: float
    before: EngineSample | None
    before_s: float | None
    reachable: bool
    outage: Outage | None
    restart: Confidence | None
    processes_before: tuple[EngineProcess, ...] | None
    front_alive: bool | None
    core_alive: bool | None
    cgroup: CgroupMemory | None

    @property
    def processes(self) -> tuple[EngineProcess, ...] | None:
        """The last known processes, of this poll if it could read them."""
        return self.processes_before if self.poll.processes is None else self.poll.processes

    @property
    def lost(self) -> tuple[str, ...]:
        """The names and PIDs of the engine's processes that ended since the last poll."""
        if self.poll.processes is None:
            return ()
        living = _identities(self.poll.processes)
        return tuple(
            f"{process.name} ({process.pid})"
            for process in self.processes_before or ()
            if process.role in _ESSENTIAL and process.identity not in living
        )

    @property
    def started(self) -> bool:
        """Whether a process of the engine started since the last poll."""
        if self.poll.processes is None or self.processes_before is None:
            return False
        known = _identities(self.processes_before)
        return any(p.role in _ESSENTIAL and p.identity not in known for p in self.poll.processes)

    @property
    def slept(self) -> bool:
        """Whether the engine was asleep at the last sample that this agent read."""
        return self.before is not None and self.before_s is not None and sleeps(self.before)

    @property
    def responds(self) -> bool:
        """Whether the engine sent metrics and passed its health check.

        Without a health check it must have computed since the last sample.
        """
        if self.poll.sample is None:
            return False
        if self.poll.health is not None:
            return self.poll.health == HEALTHY
        return computes(self.before, self.poll.sample)

    @property
    def well(self) -> bool:
        """Whether the engine that was there before works.

        A front may pass its health check for ever although its core is gone.
        """
        if self.restart is not None or not self.responds or self.poll.sample is None:
            return False
        return self.core_alive is not False or moves(self.before, self.poll.sample)

    @property
    def death_line(self) -> str | None:
        """The first line of the log that says that the engine died or did not start."""
        return next(self.poll.lines(LineMeaning.DEAD, LineMeaning.START_FAILED), None)

    def last_figures(self) -> dict[str, str | float | None]:
        """The key figures of the last sample, as evidence; empty without a sample."""
        return key_figures(self.before) if self.before else {}


class PollHistory:
    """What earlier polls showed of one engine, for comparison with the next poll."""

    def __init__(self, before: EngineSample | None) -> None:
        """`before` is the last sample of an earlier run of the agent."""
        self._sample = before
        self._sample_s: float | None = None
        self._clock_s: float | None = None
        self._reachable = False
        self._processes: tuple[EngineProcess, ...] | None = None
        self._known: dict[ProcessRole, Identities] = {}
        self._cgroup: CgroupMemory | None = None

    def compare(self, poll: Poll, outage: Outage | None) -> ComparedPoll:
        """This poll compared with the earlier ones; `outage` is that of the last poll."""
        return ComparedPoll(
            poll=poll,
            elapsed_s=0.0 if self._clock_s is None else poll.clock_s - self._clock_s,
            before=self._sample,
            before_s=self._sample_s,
            reachable=self._reachable,
            outage=outage,
            restart=self._restart(poll, outage),
            processes_before=self._processes,
            front_alive=self._alive(poll, ProcessRole.FRONT),
            core_alive=self._alive(poll, ProcessRole.CORE),
            cgroup=poll.counting_cgroup or self._cgroup,
        )

    def add(self, seen: ComparedPoll) -> None:
        """Add a poll, once every detector has observed it."""
        poll = seen.poll
        self._clock_s = poll.clock_s
        self._processes = seen.processes
        self._cgroup = seen.cgroup
        if poll.sample is None:
            self._reachable = self._reachable and not poll.unreachable
            return
        self._sample, self._sample_s, self._reachable = poll.sample, poll.clock_s, True
        for role in (ProcessRole.FRONT, ProcessRole.CORE):
            found = _identities(seen.processes or (), role)
            if found or seen.restart:
                self._known[role] = found

    def _alive(self, poll: Poll, role: ProcessRole) -> bool | None:
        """Whether a process with this role lives; None if none was ever found."""
        if poll.processes is None:
            return None
        if _identities(poll.processes, role):
            return True
        return False if self._known.get(role) else None

    def _restart(self, poll: Poll, outage: Outage | None) -> Confidence | None:
        if poll.sample is None or self._sample is None:
            return None
        living = _identities(poll.processes or ())
        for role, known in self._known.items():
            # A wrapper is taken for the front at first: it lives on in another role.
            replaced = known.isdisjoint(living) and _identities(poll.processes or (), role)
            if known and replaced:
                return Confidence.CERTAIN
        shown = restart_between(self._sample, poll.sample)
        if shown is None and outage is not None and self._lives_again(poll, outage, living):
            return Confidence.PROBABLE
        return shown

    def _lives_again(self, poll: Poll, outage: Outage, living: Identities) -> bool:
        """Whether an engine that surely died is well, and nothing shows that it is the same one."""
        died = outage.cause is not None and outage.dead is Confidence.CERTAIN
        start_known = poll.sample is not None and poll.sample.process_started_at is not None
        same = any(not known.isdisjoint(living) for known in self._known.values())
        return died and poll.health == HEALTHY and not start_known and not same


def _identities(processes: Iterable[EngineProcess], role: ProcessRole | None = None) -> Identities:
    return frozenset(p.identity for p in processes if role in (None, p.role))
