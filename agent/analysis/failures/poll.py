"""One poll of one engine, compared with the polls before it: the input of all detectors."""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from agent.analysis.failures.progress import computes, key_figures, moves, restart_between, sleeps
from agent.catalog.failure_lines import LineMeaning
from agent.catalog.reasons import NO_ANSWER, FetchFailed
from agent.records.engine import (
    CgroupMemory,
    EngineProcess,
    EngineSample,
    EngineStatus,
    HostSample,
    LogFinding,
    ProcessRole,
)
from agent.records.event import Confidence, Event, EventKind
from agent.records.gpu import XidError

Evidence = Mapping[str, str | float | None]

NO_CONNECTION = FetchFailed.CONNECTION
TIMED_OUT = FetchFailed.TIMEOUT
# With any other reason the engine sent its metrics, but they could not be read.
_UNREACHABLE = NO_ANSWER | {FetchFailed.HTTP_STATUS}

HEALTHY = 200
UNHEALTHY = 503


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """All samples of one engine at one time. What was not read is None or empty.

    `at` is Unix time. `clock_s` is the same moment on a clock that is never set, for durations.
    Either `sample` or `failure` is given: `failure` is the short reason why there is no sample.
    GPUs without an engine have neither, and `engine` is None. `health` is the HTTP status of the
    health check. `xids` are new since the last poll. `gpu_problems` are the GPUs that cannot be
    read, lost or not, with a reason word each. `recovery_actions` are what drivers ask for, 0 for
    nothing. `gpu_figures` become evidence of a death.

    The host is read after the metrics and the health check, so that a kill that ended the engine
    is counted already.
    """

    engine: str | None
    at: float
    clock_s: float
    sample: EngineSample | None = None
    failure: str | None = None
    health: int | None = None
    host: HostSample | None = None
    xids: tuple[XidError, ...] = ()
    gpu_problems: Mapping[str, str] = field(default_factory=dict)
    recovery_actions: Mapping[str, float] = field(default_factory=dict)
    gpu_figures: Evidence = field(default_factory=dict)

    @property
    def unreachable(self) -> bool:
        """Whether the engine sent no metrics and does not say that it is healthy."""
        return self.failure in _UNREACHABLE and self.health != HEALTHY

    @property
    def processes(self) -> tuple[EngineProcess, ...] | None:
        """The engine's processes; None if they could not be read."""
        return self.host.processes if self.host else None

    @property
    def counting_cgroup(self) -> CgroupMemory | None:
        """The engine's cgroup; None if its kills could not be read."""
        cgroup = self.host.cgroup if self.host else None
        return cgroup if cgroup and cgroup.oom_kills is not None else None

    @property
    def findings(self) -> tuple[LogFinding, ...]:
        """The findings in the engine's log, oldest first."""
        return self.host.log.findings if self.host and self.host.log else ()

    def lines(self, *meanings: LineMeaning) -> Iterator[str]:
        """The lines of the log that have one of these meanings, oldest first."""
        return (finding.line for finding in self.findings if finding.meaning in meanings)

    def event(
        self, kind: EventKind, confidence: Confidence, evidence: Evidence, gpu: str | None = None
    ) -> Event:
        """An event at the time of this poll."""
        event = Event(at=self.at, engine=self.engine, kind=kind, confidence=confidence, gpu=gpu)
        return replace(event, evidence=evidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionLimits:
    """When something counts as a failure. All times in seconds.

    An engine hangs if it makes no step for longer than `hang_s` and than `hang_steps` of its
    recent steps. A log line or an Xid explains a death at most `clue_s` later. A pressure is over
    after `quiet_s` without it. A driver that holds its calls for `held_s` is not merely slow.
    """

    hang_s: float = 30.0
    hang_steps: float = 10.0
    clue_s: float = 30.0
    quiet_s: float = 60.0
    held_s: float = 30.0


# The key of a recent event that explains a death, even if the next try to start has begun.
EXPLAINS = "explains"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A time in which an engine cannot be reached or is dead.

    `dead` is the confidence in its death, None if it is not dead. Firm evidence of a death needs
    no second poll. `cause` is the kind of the event that explains the death, reported at `named_s`.
    """

    since_s: float
    unreachable: bool = False
    dead: Confidence | None = None
    firm: bool = False
    polls_dead: int = 0
    at_start: bool = False
    cause: EventKind | None = None
    named_s: float = 0.0
    evidence: Evidence = field(default_factory=dict)

    @property
    def reported_dead(self) -> bool:
        """Whether an event says that the engine died, and is more than suspected."""
        return self.cause is not None and self.dead is not Confidence.SUSPECTED


@dataclass(slots=True)
class Findings:
    """The findings of one poll so far.

    `lines` are recent log lines by meaning, the first of each. `stop_line` is the line of the log
    that says that the engine was ordered to stop. `paused` is whether it is paused, `pause_shows`
    whether its metrics may show a pause, and `paused_at` is evidence of its last one. `killed` and
    `gpu_fault` are whether a recent event explains a death, `killed_near` whether one may. `hangs`
    is whether a hang lasts that is more than suspected.
    """

    lines: Mapping[LineMeaning, str] = field(default_factory=dict)
    paused: bool = False
    pause_shows: bool = False
    paused_at: Evidence = field(default_factory=dict)
    stop_line: str | None = None
    outage: Outage | None = None
    killed: bool = False
    killed_near: bool = False
    gpu_fault: bool = False
    hangs: bool = False
    status: EngineStatus | None = None

    @property
    def dead(self) -> Confidence | None:
        """The confidence in the engine's death; None if it is not dead."""
        return self.outage.dead if self.outage else None

    @property
    def cause(self) -> EventKind | None:
        """The kind of the event that explains the outage, if any."""
        return self.outage.cause if self.outage else None

    def explain_outage(self, cause: EventKind, clock_s: float) -> None:
        """Give the outage its cause, unless there is none or it has one."""
        if self.outage is not None and self.outage.cause is None:
            self.outage = replace(self.outage, cause=cause, named_s=clock_s)


class Ongoing:
    """Conditions that last, each under a key, with the clock time at which it was found last."""

    def __init__(self, quiet_s: float) -> None:
        """A condition is over when it was not found for `quiet_s`."""
        self._quiet_s = quiet_s
        self._last_s: dict[Hashable, float] = {}

    def begins(self, key: Hashable, clock_s: float) -> bool:
        """Record the condition as found now. True if it was over, or never found before."""
        last_s = self._last_s.get(key)
        self._last_s[key] = clock_s
        return last_s is None or clock_s - last_s >= self._quiet_s

    def lately(self, key: Hashable, clock_s: float, within_s: float) -> bool:
        """Whether the condition was found in the last `within_s`."""
        last_s = self._last_s.get(key)
        return last_s is not None and clock_s - last_s <= within_s

    def end(self, *keys: Hashable) -> None:
        """Record these conditions as over."""
        for key in keys:
            self._last_s.pop(key, None)


_ESSENTIAL = frozenset({ProcessRole.FRONT, ProcessRole.CORE, ProcessRole.WORKER})

Identities = frozenset[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPoll:
    """One poll compared with the polls before it. What is unknown is None.

    `before` is the last sample before this poll, read at `before_s`; that is None if an earlier
    run of the agent read it. `reachable` is whether the last poll reached the engine, `outage` the
    outage after the last poll. `restart` is the confidence that the engine restarted since.
    `starts` is whether another front lives than at the last sample. `processes_before` and `cgroup`
    are the last known ones.
    """

    poll: Poll
    elapsed_s: float
    before: EngineSample | None
    before_s: float | None
    reachable: bool
    outage: Outage | None
    restart: Confidence | None
    starts: bool
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
            starts=poll.sample is None and self._starts(poll),
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

    def _starts(self, poll: Poll) -> bool:
        known = self._known.get(ProcessRole.FRONT, frozenset())
        living = _identities(poll.processes or (), ProcessRole.FRONT)
        return bool(known) and bool(living) and known.isdisjoint(living)

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
