"""What one poll shows when it is held against the ones before it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agent.analysis.failures.beats import computes, moves, takes_work
from agent.analysis.failures.gpus import blamed_xids
from agent.analysis.failures.pauses import pause_after
from agent.analysis.failures.poll import HEALTHY, NO_CONNECTION, UNHEALTHY, DetectionLimits, Poll
from agent.analysis.failures.restarts import restart_between
from agent.analysis.failures.state import Clue, Identities, Pause, Watching
from agent.catalog.failure_lines import LineMeaning
from agent.records.event import Confidence
from agent.records.host import CgroupMemory, EngineProcess, ProcessRole

_ESSENTIAL = frozenset({ProcessRole.FRONT, ProcessRole.CORE, ProcessRole.WORKER})
_CLUES = frozenset(
    {
        LineMeaning.CUDA_OOM,
        LineMeaning.SIZING_ERROR,
        LineMeaning.GPU_FAULT,
        LineMeaning.HANG,
        LineMeaning.LAST_STATS,
    }
)
# An engine that takes new requests so long after it was told to stop was not, or stayed. Those that
# it had it may finish for as long as it is let (vLLM `--shutdown-timeout`).
_STOP_TAKES_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """The signs of one poll. `processes` are the last known ones; what cannot be told is None."""

    clock_s: float
    elapsed_s: float
    restart: Confidence | None
    processes: tuple[EngineProcess, ...] | None
    lost: tuple[str, ...]
    front_alive: bool | None
    core_alive: bool | None
    worker_alive: bool
    cgroup: CgroupMemory | None
    kills: int
    node_oom_kills: int | None
    polls_since_node_kill: int | None
    pause: Pause | None
    clues: Mapping[LineMeaning, Clue]
    death_line: str | None
    exit_code: int | None
    start_failed: bool
    stopping: Clue | None
    log_silent: bool
    unhealthy: bool
    came: bool
    well: bool

    @property
    def stop_line(self) -> str | None:
        """The line that told the engine to stop."""
        return None if self.stopping is None else self.stopping.line

    def clue(self, meaning: LineMeaning) -> str | None:
        """The line that said so lately, if one did."""
        found = self.clues.get(meaning)
        return None if found is None else found.line


def read_signs(poll: Poll, before: Watching, limits: DetectionLimits) -> Signs:
    """The signs of a poll."""
    elapsed_s = 0.0 if before.clock_s is None else poll.clock_s - before.clock_s
    processes = _seen_processes(poll)
    front_alive = _alive(before, processes, ProcessRole.FRONT)
    fates = _Fates(poll, before)
    core_alive = _alive(before, processes, ProcessRole.CORE)
    restart = _restart(poll, before)
    return Signs(
        clock_s=poll.clock_s,
        elapsed_s=elapsed_s,
        restart=restart,
        processes=before.processes if processes is None else processes,
        lost=_lost(before, processes),
        front_alive=front_alive,
        core_alive=core_alive,
        worker_alive=any(p.role is ProcessRole.WORKER for p in processes or ()),
        cgroup=_cgroup(poll) or before.cgroup,
        kills=_kills(before.cgroup, _cgroup(poll)),
        node_oom_kills=_node_oom_kills(poll, before),
        polls_since_node_kill=_polls_since_node_kill(poll, before),
        pause=pause_after(poll, before),
        clues=_clues(poll, before, limits),
        death_line=fates.death_line,
        exit_code=fates.exit_code,
        start_failed=fates.start_failed,
        stopping=fates.stopping,
        log_silent=_log_silent(poll, before),
        # The health of a new life says nothing of the old one's end.
        unhealthy=poll.health == UNHEALTHY and restart is None,
        came=_came(before, processes),
        well=_is_well(poll, before, core_alive) and restart is None,
    )


def identities(signs: Signs, role: ProcessRole) -> Identities:
    """The processes that have a role."""
    return frozenset(p.identity for p in signs.processes or () if p.role is role)


def _seen_processes(poll: Poll) -> tuple[EngineProcess, ...] | None:
    return poll.host.processes if poll.host else None


def _lost(before: Watching, processes: tuple[EngineProcess, ...] | None) -> tuple[str, ...]:
    if processes is None:
        return ()
    alive = {process.identity for process in processes}
    return tuple(
        f"{process.name} ({process.pid})"
        for process in before.processes or ()
        if process.role in _ESSENTIAL and process.identity not in alive
    )


def _came(before: Watching, processes: tuple[EngineProcess, ...] | None) -> bool:
    """Whether a process of the engine's is there that was not at the last look."""
    if processes is None or before.processes is None:
        return False
    known = {process.identity for process in before.processes}
    return any(p.role in _ESSENTIAL and p.identity not in known for p in processes)


def _alive(
    before: Watching, processes: tuple[EngineProcess, ...] | None, role: ProcessRole
) -> bool | None:
    """Whether a process with this role lives; None unless one was ever seen to."""
    if processes is None:
        return None
    if any(process.role is role for process in processes):
        return True
    known = before.fronts if role is ProcessRole.FRONT else before.cores
    return False if known else None


def _restart(poll: Poll, before: Watching) -> Confidence | None:
    if poll.sample is None or before.sample is None:
        return None
    seen = _seen_processes(poll) or ()
    living = {process.identity for process in seen}
    for role, known in ((ProcessRole.FRONT, before.fronts), (ProcessRole.CORE, before.cores)):
        # One that lives in another role was mistaken for the front, as a wrapper is at first.
        if known and known.isdisjoint(living) and any(process.role is role for process in seen):
            return Confidence.CERTAIN
    told = restart_between(before.sample, poll.sample)
    return Confidence.PROBABLE if told is None and _lives_again(poll, before, living) else told


def _lives_again(poll: Poll, before: Watching, living: set[tuple[int, float]]) -> bool:
    """Whether an engine that surely died is well, and nothing shows that it is the same one."""
    outage = before.outage
    died = outage is not None and outage.cause is not None and outage.dead is Confidence.CERTAIN
    start_told = poll.sample is not None and poll.sample.process_started_at is not None
    shown = start_told or not (before.fronts | before.cores).isdisjoint(living)
    return died and poll.health == HEALTHY and not shown


def _cgroup(poll: Poll) -> CgroupMemory | None:
    cgroup = poll.host.cgroup if poll.host else None
    return cgroup if cgroup and cgroup.oom_kills is not None else None


def _kills(before: CgroupMemory | None, now: CgroupMemory | None) -> int:
    """Kills that the same cgroup counted since; another one has counts of its own."""
    if before is None or now is None or before.inode != now.inode:
        return 0
    return max((now.oom_kills or 0) - (before.oom_kills or 0), 0)


def _node_oom_kills(poll: Poll, before: Watching) -> int | None:
    now = poll.host.node_oom_kills if poll.host else None
    return before.node_oom_kills if now is None else now


def _polls_since_node_kill(poll: Poll, before: Watching) -> int | None:
    now = _node_oom_kills(poll, before)
    if now is not None and before.node_oom_kills is not None and now > before.node_oom_kills:
        return 0
    ago = before.polls_since_node_kill
    return None if ago is None else ago + 1


def _clues(poll: Poll, before: Watching, limits: DetectionLimits) -> dict[LineMeaning, Clue]:
    fresh = {
        meaning: clue
        for meaning, clue in before.clues.items()
        if poll.clock_s - clue.at_s <= limits.clue_s
    }
    for meaning, line in _said(poll):
        # What was said first is nearest to the cause.
        first = fresh.get(meaning)
        fresh[meaning] = Clue(poll.clock_s, first.line if first else line)
    return fresh


def _said(poll: Poll) -> Iterator[tuple[LineMeaning, str]]:
    for line in blamed_xids(poll):
        yield LineMeaning.GPU_FAULT, line
    for finding in poll.findings:
        if finding.meaning in _CLUES:
            yield finding.meaning, finding.line


def _log_silent(poll: Poll, before: Watching) -> bool:
    """Whether a log that spoke of this engine ended without a word on why."""
    followed = poll.host is not None and poll.host.log is not None and before.log_spoke
    return followed and poll.failure == NO_CONNECTION and not before.front_ended


class _Fates:
    """What the log says became of the engine: whether it was stopped, or died, or never started.

    A front that is told to stop before anything went wrong stops the rest of the engine; one that
    ends because the core died may say that it stops as well, but later.
    """

    def __init__(self, poll: Poll, before: Watching) -> None:
        self.stopping = None if _works_on(poll, before) else before.stopping
        self.death_line: str | None = None
        self.exit_code: int | None = None
        self.start_failed = False
        died = before.outage is not None and before.outage.firm
        for finding in poll.findings:
            if finding.meaning is LineMeaning.STOPPING and not died:
                self.stopping = self.stopping or Clue(poll.clock_s, finding.line)
            if finding.meaning in (LineMeaning.DEAD, LineMeaning.START_FAILED):
                died = True
                self.death_line = self.death_line or finding.line
            if finding.meaning is LineMeaning.START_FAILED:
                # Whatever was stopped before, this is another try.
                self.start_failed, self.stopping = True, None
            self.exit_code = self.exit_code if finding.exit_code is None else finding.exit_code


def _works_on(poll: Poll, before: Watching) -> bool:
    """Whether the engine takes new work long after it was told to stop."""
    if before.stopping is None or poll.clock_s - before.stopping.at_s <= _STOP_TAKES_S:
        return False
    taken = poll.sample is not None and takes_work(before.sample, poll.sample)
    return taken and _is_well(poll, before, None)


def is_back(poll: Poll, before: Watching, signs: Signs) -> bool:
    """Whether an engine that was out is well again without having restarted."""
    outage = before.outage
    if outage is None or poll.sample is None or signs.restart or signs.death_line:
        return False
    return signs.well or (poll.health is None and outage.unreachable)


def _is_well(poll: Poll, before: Watching, core_alive: bool | None) -> bool:
    """Whether the engine works, as far as its page and its health check tell.

    A front may believe so for ever of a core that is gone.
    """
    if poll.sample is None or (core_alive is False and not moves(before.sample, poll.sample)):
        return False
    if poll.health is not None:
        return poll.health == HEALTHY
    return computes(before.sample, poll.sample)
