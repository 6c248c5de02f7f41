"""HANG: an engine has work, is awake, and makes no step.

Data-parallel ranks are judged one by one, because ranks that go on would hide one that hangs.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from agent.analysis.failures.findings import Findings
from agent.analysis.failures.heartbeat import Beat, beat_of, has_work, moves
from agent.analysis.failures.observation import Observation
from agent.analysis.failures.poll import TIMED_OUT, DetectionLimits, Evidence
from agent.catalog.engine_facts import STEPS
from agent.catalog.failure_lines import LineMeaning
from agent.records.engine import EngineSample
from agent.records.event import Confidence, Event, EventKind
from agent.records.host import EngineProcess, ProcessRole

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
# A front that does not respond may be busy for so many times `hang_s`.
_EXCUSES = 4
# The rank in the title of a core (vLLM 0.32 `v1/engine/core.py`).
_CORE_OF_RANK = re.compile(r"::EngineCore_DP(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pulse:
    """What shows that a rank computes.

    `beat` are its facts at `beat_s`, when they changed last. `step_s` is the recent time per step,
    `stalled_s` how long it made no step with work to do.
    """

    beat: Beat | None = None
    steps: float | None = None
    beat_s: float = 0.0
    step_s: float = 0.0
    busy: bool = False
    stalled_s: float = 0.0

    def step_s_after(self, steps: float | None, clock_s: float) -> float:
        """The recent time per step, in which a long step counts for a few polls."""
        faded = self.step_s * _STEP_DECAY
        if steps is None or self.steps is None or steps <= self.steps:
            return faded
        return max(faded, (clock_s - self.beat_s) / (steps - self.steps))


class HangDetector:
    """Reports a hang once, until the rank or the process goes on."""

    def __init__(self, limits: DetectionLimits) -> None:
        self._limits = limits
        self._reported: frozenset[str] = frozenset()
        self._forget()

    def _forget(self) -> None:
        self._pulses: Mapping[str, _Pulse] = {}
        # Ranks that were given up: their cores are gone, and their facts may stay.
        self._given_up: frozenset[str] = frozenset()
        self._stopped_polls = 0
        # For how long the front did not respond while the core computed.
        self._excused_s = 0.0

    def observe(self, seen: Observation, found: Findings) -> tuple[Event, ...]:
        """The hang that begins with this poll."""
        timed_out = self._timed_out(seen)
        if found.dead is not None and not seen.well:
            if timed_out:
                self._reported |= {_TIMED_OUT, *self._pulses}
            self._forget()
            events = timed_out
        else:
            self._feel(seen, paused=found.pause is not None and found.pause.lasts)
            if timed_out:
                self._reported = frozenset({_TIMED_OUT, *self._pulses})
            events = timed_out or self._hang(seen, found)
        if seen.restart:
            self._forget()
            self._reported = frozenset()
        return events

    def _timed_out(self, seen: Observation) -> tuple[Event, ...]:
        """The event of a time-out in the log, unless the engine computes all the same."""
        line = next(seen.poll.lines(LineMeaning.HANG), None)
        if line is None or self._reported or _all_move(seen):
            return ()
        evidence = {**seen.last_figures(), "log_line": line}
        return (seen.poll.event(EventKind.HANG, Confidence.CERTAIN, evidence),)

    def _hang(self, seen: Observation, found: Findings) -> tuple[Event, ...]:
        stopped = self._stopped_polls >= _STOPPED_POLLS and not seen.slept
        standing = frozenset() if seen.slept else self._standing()
        self._reported = self._still_reported(seen, standing)
        if not (not self._reported if stopped else standing - self._reported):
            return ()
        confidence = Confidence.CERTAIN if stopped else self._confidence(seen, standing)
        evidence = {**seen.last_figures(), **found.paused_at, **self._evidence(seen)}
        # Ranks that wait for each other stop within moments: what stands now is the same hang.
        same = {*self._pulses, _STOPPED} if stopped else self._reported | self._stalled()
        self._reported = frozenset(same)
        return (seen.poll.event(EventKind.HANG, confidence, evidence),)

    def _still_reported(self, seen: Observation, standing: frozenset[str]) -> frozenset[str]:
        """What was reported and did not go on since."""
        moved = seen.poll.sample is not None and moves(seen.before, seen.poll.sample)
        lasting = {_STOPPED} if self._stopped_polls else set()
        lasting |= set() if moved else {_TIMED_OUT}
        # A stalled rank during a stopped process or a time-out belongs to that event.
        same = standing if self._reported & {_STOPPED, _TIMED_OUT} else frozenset()
        return (self._reported | same) & (self._stalled() | lasting)

    def _confidence(self, seen: Observation, standing: frozenset[str]) -> Confidence:
        """Suspected for a rank that may have been given up: its facts stand still as well."""
        others_move = any(pulse.busy and not pulse.stalled_s for pulse in self._pulses.values())
        given_up = others_move and not standing <= _ranks_of_cores(seen.processes)
        excused = self._excused_s > _EXCUSES * self._limits.hang_s
        return Confidence.SUSPECTED if given_up or excused else Confidence.PROBABLE

    def _feel(self, seen: Observation, *, paused: bool) -> None:
        if seen.poll.processes is not None:
            self._stopped_polls = self._stopped_polls + 1 if _stopped(seen) else 0
        if seen.poll.sample is None:
            self._no_response(seen)
            return
        cores = _ranks_of_cores(seen.processes)
        self._given_up = (self._given_up | _ranks_of_cores(seen.processes_before)) - cores
        ranks = seen.poll.sample.ranks or {_WHOLE: seen.poll.sample}
        self._pulses = {
            rank: self._pulse(sample, self._pulses.get(rank, _Pulse()), seen, paused=paused)
            for rank, sample in ranks.items()
            if rank not in self._given_up
        }
        self._excused_s = 0.0

    def _no_response(self, seen: Observation) -> None:
        """A front that lives and does not respond has the work that it had."""
        if seen.poll.failure != TIMED_OUT or seen.front_alive is not True:
            self._excused_s = 0.0
        elif _core_computes(seen) and self._excused_s <= _EXCUSES * self._limits.hang_s:
            self._excused_s += min(seen.elapsed_s, self._limits.hang_s)
        else:
            self._pulses = {
                rank: self._after_stall(pulse, seen) if pulse.busy else pulse
                for rank, pulse in self._pulses.items()
            }

    def _pulse(
        self, sample: EngineSample, pulse: _Pulse, seen: Observation, *, paused: bool
    ) -> _Pulse:
        beat, steps, now_s = beat_of(sample), sample.fact(STEPS.name), seen.poll.clock_s
        if beat is None or paused or not has_work(sample):
            return _Pulse(beat=beat, steps=steps, beat_s=now_s)
        if beat != pulse.beat:
            step_s = pulse.step_s_after(steps, now_s)
            return _Pulse(beat=beat, steps=steps, beat_s=now_s, step_s=step_s, busy=True)
        return self._after_stall(pulse, seen) if pulse.busy else replace(pulse, busy=True)

    def _after_stall(self, pulse: _Pulse, seen: Observation) -> _Pulse:
        # One poll is not enough for a hang, however long the agent itself was away.
        waited_s = min(seen.elapsed_s, self._patience_s(pulse) / 2)
        return replace(pulse, stalled_s=pulse.stalled_s + waited_s)

    def _patience_s(self, pulse: _Pulse) -> float:
        return max(self._limits.hang_s, self._limits.hang_steps * pulse.step_s)

    def _standing(self) -> frozenset[str]:
        """The ranks that made no step for too long."""
        pulses = self._pulses.items()
        return frozenset(rank for rank, p in pulses if p.stalled_s > self._patience_s(p))

    def _stalled(self) -> frozenset[str]:
        """The ranks that made no step since the last poll."""
        return frozenset(rank for rank, pulse in self._pulses.items() if pulse.stalled_s > 0)

    def _evidence(self, seen: Observation) -> Evidence:
        longest = max(self._pulses.values(), key=lambda pulse: pulse.stalled_s, default=_Pulse())
        return {
            "page": seen.poll.failure,
            "health": seen.poll.health,
            "processes_stopped": ", ".join(_stopped(seen)) or None,
            "process_states": "".join(process.state for process in seen.processes or ()) or None,
            "stalled_s": longest.stalled_s,
            "recent_step_s": longest.step_s or None,
            "ranks_standing": ", ".join(sorted(self._standing())) or None,
        }


def _all_move(seen: Observation) -> bool:
    """Whether the engine and each of its ranks computed since the last sample."""
    if seen.poll.sample is None:
        return False
    before = seen.before.ranks if seen.before else {}
    # An engine that shows no request in its batch may have got one just now.
    ranks = seen.poll.sample.ranks.items()
    return moves(seen.before, seen.poll.sample) and all(
        moves(before.get(rank), sample) for rank, sample in ranks
    )


def _core_computes(seen: Observation) -> bool:
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


def _stopped(seen: Observation) -> list[str]:
    """The engine's processes that a signal or a debugger stopped."""
    return [
        f"{process.name} ({process.pid})"
        for process in seen.processes or ()
        if process.stopped and process.role is not ProcessRole.OTHER
    ]
