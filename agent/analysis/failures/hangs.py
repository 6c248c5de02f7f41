"""HANG: an engine has work, is awake, and makes no step.

Data-parallel ranks are judged one by one, because ranks that go on would hide one that hangs.
"""

import re
from collections.abc import Iterable, Iterator

from agent.analysis.failures.poll import (
    TIMED_OUT,
    ComparedPoll,
    DetectionLimits,
    Evidence,
    Findings,
)
from agent.analysis.failures.progress import Progress, has_work, moves, progress_of
from agent.catalog.engine_facts import STEPS
from agent.catalog.failure_lines import LineMeaning
from agent.records.engine import EngineProcess, EngineSample, ProcessRole
from agent.records.event import Confidence, Event, EventKind

# A core that only waits uses less than this share of a CPU.
_COMPUTING_SHARE = 0.1
# A long step is forgotten within a few polls that showed shorter ones.
_STEP_DECAY = 0.8
# The rank of an engine that reports no ranks.
_WHOLE = ""
# A process that a signal stopped may be continued at once.
_STOPPED_POLLS = 2
# Reported hangs that are not of a rank: a stopped process, and a time-out that the log shows.
_STOPPED = "stopped"
_TIMED_OUT = "timed out"
# A front that does not respond may be busy for this many times `hang_s`.
_EXCUSES = 4
# The rank in the title of a core (vLLM 0.32 `v1/engine/core.py`).
_CORE_OF_RANK = re.compile(r"::EngineCore_DP(\d+)$")


class _RankSteps:
    """Counts the steps of a data-parallel rank, or of an engine that reports no ranks."""

    def __init__(self, limits: DetectionLimits) -> None:
        self._limits = limits
        # Facts that change with each step, and when they changed last.
        self._progress: Progress | None = None
        self._steps: float | None = None
        self._progress_s = 0.0
        # The recent time per step, in which a long step counts for a few polls.
        self.step_s = 0.0
        self.busy = False
        # For how long it made no step with work to do.
        self.stalled_s = 0.0

    @property
    def hangs(self) -> bool:
        """Whether it made no step for so long that it hangs."""
        return self.stalled_s > self._patience_s

    @property
    def _patience_s(self) -> float:
        return max(self._limits.hang_s, self._limits.hang_steps * self.step_s)

    def read(self, sample: EngineSample, seen: ComparedPoll, *, paused: bool) -> None:
        """Compare a sample of the rank with its last one."""
        progress, steps, now_s = progress_of(sample), sample.fact(STEPS.name), seen.poll.clock_s
        idle = progress is None or paused or not has_work(sample)
        if not idle and progress == self._progress:
            # A rank that just got work may have had no time for a step.
            self.stall(seen.elapsed_s)
            self.busy = True
            return
        self.step_s = 0.0 if idle else self._step_s(steps, now_s)
        self._progress, self._steps, self._progress_s = progress, steps, now_s
        self.busy, self.stalled_s = not idle, 0.0

    def stall(self, elapsed_s: float) -> None:
        """Count time without a step, if the rank had work before."""
        if self.busy:
            # One poll is not enough for a hang, however long the agent itself was away.
            self.stalled_s += min(elapsed_s, self._patience_s / 2)

    def _step_s(self, steps: float | None, now_s: float) -> float:
        faded = self.step_s * _STEP_DECAY
        if steps is None or self._steps is None or steps <= self._steps:
            return faded
        return max(faded, (now_s - self._progress_s) / (steps - self._steps))


class HangDetector:
    """Reports a hang once, until the rank or the process goes on."""

    def __init__(self, limits: DetectionLimits) -> None:
        self._limits = limits
        self._reported: frozenset[str] = frozenset()
        self._suspected = False
        self._forget()

    def _forget(self) -> None:
        self._ranks: dict[str, _RankSteps] = {}
        # Ranks that were given up: their cores are gone, and their facts may stay.
        self._given_up: frozenset[str] = frozenset()
        self._stopped_polls = 0
        # For how long the front did not respond while the core computed.
        self._excused_s = 0.0

    def observe(self, seen: ComparedPoll, found: Findings) -> Iterator[Event]:
        """The hang that begins with this poll. Finds whether a hang lasts."""
        for event in self._hangs(seen, found):
            self._suspected = event.confidence is Confidence.SUSPECTED
            yield event
        found.hangs = bool(self._reported) and not self._suspected

    def _hangs(self, seen: ComparedPoll, found: Findings) -> Iterator[Event]:
        timed_out = self._timed_out(seen)
        dead = found.dead is not None and not seen.well
        if not dead:
            self._read(seen, paused=found.paused)
        if timed_out:
            self._reported = frozenset({_TIMED_OUT, *self._ranks})
            evidence = {**seen.last_figures(), "log_line": timed_out}
            yield seen.poll.event(EventKind.HANG, Confidence.CERTAIN, evidence)
        elif not dead:
            yield from self._hang(seen, found)
        if dead or seen.restart:
            self._forget()
        if seen.restart:
            self._reported = frozenset()

    def _timed_out(self, seen: ComparedPoll) -> str | None:
        """The line of a time-out in the log; None if the engine computes all the same."""
        line = next(seen.poll.lines(LineMeaning.HANG), None)
        return None if self._reported or _all_move(seen) else line

    def _hang(self, seen: ComparedPoll, found: Findings) -> Iterator[Event]:
        stopped = self._stopped_polls >= _STOPPED_POLLS and not seen.slept
        hanging = frozenset() if seen.slept else self._hanging()
        self._reported = self._still_reported(seen, hanging)
        begins = not self._reported if stopped else bool(hanging - self._reported)
        if not begins:
            return
        confidence = Confidence.CERTAIN if stopped else self._confidence(seen, hanging)
        evidence = {**seen.last_figures(), **found.paused_at, **self._evidence(seen)}
        # Ranks that wait for each other stop soon after each other: they are the same hang.
        same = {*self._ranks, _STOPPED} if stopped else self._reported | self._stalled()
        self._reported = frozenset(same)
        yield seen.poll.event(EventKind.HANG, confidence, evidence)

    def _still_reported(self, seen: ComparedPoll, hanging: frozenset[str]) -> frozenset[str]:
        """What was reported and did not go on since."""
        moved = seen.poll.sample is not None and moves(seen.before, seen.poll.sample)
        lasting = {_STOPPED} if self._stopped_polls else set()
        lasting |= set() if moved else {_TIMED_OUT}
        # A stalled rank during a stopped process or a time-out belongs to that event.
        same = hanging if self._reported & {_STOPPED, _TIMED_OUT} else frozenset()
        return (self._reported | same) & (self._stalled() | lasting)

    def _confidence(self, seen: ComparedPoll, hanging: frozenset[str]) -> Confidence:
        """Suspected for a rank that may have been given up: its facts stand still as well."""
        others_move = any(rank.busy and not rank.stalled_s for rank in self._ranks.values())
        given_up = others_move and not hanging <= _ranks_of_cores(seen.processes)
        excused = self._excused_s > _EXCUSES * self._limits.hang_s
        return Confidence.SUSPECTED if given_up or excused else Confidence.PROBABLE

    def _read(self, seen: ComparedPoll, *, paused: bool) -> None:
        if seen.poll.processes is not None:
            self._stopped_polls = self._stopped_polls + 1 if _stopped(seen) else 0
        if seen.poll.sample is None:
            self._no_response(seen)
            return
        cores = _ranks_of_cores(seen.processes)
        self._given_up = (self._given_up | _ranks_of_cores(seen.processes_before)) - cores
        samples = seen.poll.sample.ranks or {_WHOLE: seen.poll.sample}
        named = [name for name in samples if name not in self._given_up]
        self._ranks = {name: self._ranks.get(name) or _RankSteps(self._limits) for name in named}
        for name, rank in self._ranks.items():
            rank.read(samples[name], seen, paused=paused)
        self._excused_s = 0.0

    def _no_response(self, seen: ComparedPoll) -> None:
        """A front that lives and does not respond has the work that it had."""
        if seen.poll.failure != TIMED_OUT or seen.front_alive is not True:
            self._excused_s = 0.0
        elif core_computes(seen) and self._excused_s <= _EXCUSES * self._limits.hang_s:
            self._excused_s += min(seen.elapsed_s, self._limits.hang_s)
        else:
            for rank in self._ranks.values():
                rank.stall(seen.elapsed_s)

    def _hanging(self) -> frozenset[str]:
        return frozenset(name for name, rank in self._ranks.items() if rank.hangs)

    def _stalled(self) -> frozenset[str]:
        return frozenset(name for name, rank in self._ranks.items() if rank.stalled_s > 0)

    def _evidence(self, seen: ComparedPoll) -> Evidence:
        longest = max(self._ranks.values(), key=lambda rank: rank.stalled_s, default=None)
        return {
            "page": seen.poll.failure,
            "health": seen.poll.health,
            "processes_stopped": ", ".join(_stopped(seen)) or None,
            "process_states": "".join(process.state for process in seen.processes or ()) or None,
            "stalled_s": longest.stalled_s if longest else 0.0,
            "recent_step_s": (longest and longest.step_s) or None,
            "ranks_standing": ", ".join(sorted(self._hanging())) or None,
        }


def _all_move(seen: ComparedPoll) -> bool:
    """Whether the engine and each of its ranks computed since the last sample."""
    if seen.poll.sample is None:
        return False
    before = seen.before.ranks if seen.before else {}
    # An engine that shows no request in its batch may have got one just now.
    ranks = seen.poll.sample.ranks.items()
    return moves(seen.before, seen.poll.sample) and all(
        moves(before.get(rank), sample) for rank, sample in ranks
    )


def core_computes(seen: ComparedPoll) -> bool:
    """Whether the front is merely too busy to respond: a core that waits for it needs no CPU."""
    spent_s = {process.identity: process.cpu_s for process in seen.processes_before or ()}
    computed_s = sum(
        process.cpu_s - spent_s.get(process.identity, process.cpu_s)
        for process in seen.processes or ()
        if process.role is ProcessRole.CORE
    )
    return computed_s > _COMPUTING_SHARE * seen.elapsed_s


def _ranks_of_cores(processes: Iterable[EngineProcess] | None) -> frozenset[str]:
    """The data-parallel ranks whose cores are among these processes, by their titles."""
    found = (_CORE_OF_RANK.search(process.name) for process in processes or ())
    return frozenset(title[1] for title in found if title)


def _stopped(seen: ComparedPoll) -> list[str]:
    return [
        f"{process.name} ({process.pid})"
        for process in seen.processes or ()
        if process.stopped and process.role is not ProcessRole.OTHER
    ]
