"""Whether an engine hangs: it has work, it is awake, and its heartbeat stands still.

Data-parallel ranks are judged one by one: those that go on would hide one that does not.
"""

import re
from collections.abc import Iterable
from dataclasses import replace

from agent.analysis.failures.beats import beat_of, has_work, moves
from agent.analysis.failures.pauses import pause_noted
from agent.analysis.failures.poll import TIMED_OUT, DetectionLimits, Poll
from agent.analysis.failures.signs import Signs
from agent.analysis.failures.state import Heartbeat, Outage, Pulse, Watching
from agent.catalog.engine_facts import STEPS
from agent.catalog.failure_lines import LineMeaning
from agent.records.engine import EngineSample
from agent.records.event import Confidence, Event, EventKind
from agent.records.host import EngineProcess, ProcessRole

# Of the time, what a core spends on the CPU that is not merely waiting.
_COMPUTING_SHARE = 0.1
# A long step is forgotten within a few polls that showed shorter ones.
_STEP_DECAY = 0.8
# The key of an engine that is not told of by rank.
_WHOLE = ""
# A process that a signal stopped may be let go on at once.
_STOPPED_POLLS = 2
# What stands for a stopped process among the ranks that were told of.
_STOPPED = "stopped"
# What stands there for a hang that the engine itself gave up on, until anything moves.
_SAID = "said"
# So many times as long as a hang takes, a front that does not answer may be merely busy.
_EXCUSES = 4
# The rank in the title of a core (vLLM 0.32 `v1/engine/core.py`).
_CORE_OF_RANK = re.compile(r"::EngineCore_DP(\d+)$")


def heartbeat_after(
    poll: Poll, before: Watching, signs: Signs, outage: Outage | None, limits: DetectionLimits
) -> tuple[tuple[Event, ...], Heartbeat]:
    """The event of a hang that begins to show with this poll, and the heartbeat after it."""
    said = _hang_said(poll, before)
    if outage is not None and outage.dead is not None and not signs.well:
        told = frozenset({_SAID, *before.heartbeat.pulses}) if said else frozenset()
        return said, Heartbeat(told=before.heartbeat.told | told)
    heart = _felt(poll, before, signs, limits)
    if said:
        return said, replace(heart, told=frozenset({_SAID, *heart.pulses}))
    stopped = heart.stopped_polls >= _STOPPED_POLLS
    standing = frozenset() if before.asleep else _standing(heart, limits)
    heart = replace(heart, told=_still_told(poll, before, heart, standing))
    fresh = not heart.told if stopped and not before.asleep else bool(standing - heart.told)
    if not fresh:
        return (), heart
    evidence = _evidence(poll, before, signs) | _figures(heart, limits)
    sure = Confidence.CERTAIN if stopped else _sureness(signs, heart, standing, limits)
    event = poll.event(EventKind.HANG, sure, evidence)
    # Whatever stands with it already is the same hang: ranks that wait for each other stop within
    # moments, and the patience with each is its own.
    same = {*heart.pulses, _STOPPED} if stopped else heart.told | _stalled_ranks(heart)
    return (event,), replace(heart, told=frozenset(same))


def _hang_said(poll: Poll, before: Watching) -> tuple[Event, ...]:
    """A hang that the engine itself gave up on; no line makes one of an engine that computes."""
    lines = [found.line for found in poll.findings if found.meaning is LineMeaning.HANG]
    if not lines or before.heartbeat.told or not _may_hang(poll, before):
        return ()
    evidence = {**before.last_figures(), "log_line": lines[0]}
    return (poll.event(EventKind.HANG, Confidence.CERTAIN, evidence),)


def _may_hang(poll: Poll, before: Watching) -> bool:
    if poll.sample is None:
        return True
    then = before.sample.ranks if before.sample else {}
    moved = [moves(then.get(rank), sample) for rank, sample in poll.sample.ranks.items()]
    # What the page shows as no request in the batch may be one that just came.
    return not all(moved) or not moves(before.sample, poll.sample)


def _still_told(
    poll: Poll, before: Watching, heart: Heartbeat, standing: frozenset[str]
) -> frozenset[str]:
    """What was told of and did not move since."""
    moved = poll.sample is not None and moves(before.sample, poll.sample)
    going_on = {_STOPPED} if heart.stopped_polls else set()
    going_on |= set() if moved else {_SAID}
    # Whatever stands with a stopped process, or with what the engine said, is the same hang.
    same = standing if heart.told & {_STOPPED, _SAID} else frozenset()
    return (heart.told | same) & (_stalled_ranks(heart) | going_on)


def _stalled_ranks(heart: Heartbeat) -> frozenset[str]:
    """The ranks that have not moved since the last look."""
    return frozenset(rank for rank, pulse in heart.pulses.items() if pulse.stalled_s > 0)


def _sureness(
    signs: Signs, heart: Heartbeat, standing: frozenset[str], limits: DetectionLimits
) -> Confidence:
    """A rank that was given up leaves figures on the page that stand as those of one that hangs."""
    others_move = any(pulse.busy and not pulse.stalled_s for pulse in heart.pulses.values())
    given_up = others_move and not standing <= _cores(signs.processes)
    excused = heart.excused_s > _EXCUSES * limits.hang_s
    return Confidence.SUSPECTED if given_up or excused else Confidence.PROBABLE


def _stands(pulse: Pulse, limits: DetectionLimits) -> bool:
    return pulse.stalled_s > _patience_s(pulse, limits)


def _patience_s(pulse: Pulse, limits: DetectionLimits) -> float:
    return max(limits.hang_s, limits.hang_steps * pulse.step_s)


def _felt(poll: Poll, before: Watching, signs: Signs, limits: DetectionLimits) -> Heartbeat:
    heart = replace(before.heartbeat, stopped_polls=_stopped_polls(poll, before, signs))
    if poll.sample is None:
        return _unanswered(poll, before, signs, limits, heart)
    cores, cores_then = _cores(signs.processes), _cores(before.processes)
    gone = (heart.gone | cores_then) - cores
    ranks = poll.sample.ranks or {_WHOLE: poll.sample}
    pulses = {
        rank: _pulse(sample, heart.pulses.get(rank, Pulse()), signs, limits)
        for rank, sample in ranks.items()
        if rank not in gone
    }
    return replace(heart, pulses=pulses, gone=gone, excused_s=0.0)


def _cores(processes: Iterable[EngineProcess] | None) -> frozenset[str]:
    """The data-parallel ranks whose cores are among these, as their titles tell."""
    found = (_CORE_OF_RANK.search(process.name) for process in processes or ())
    return frozenset(name[1] for name in found if name)


def _unanswered(
    poll: Poll, before: Watching, signs: Signs, limits: DetectionLimits, heart: Heartbeat
) -> Heartbeat:
    """A front that lives and does not answer has the work that it had."""
    if poll.failure != TIMED_OUT or signs.front_alive is not True:
        return replace(heart, excused_s=0.0)
    if _core_computes(before, signs) and heart.excused_s <= _EXCUSES * limits.hang_s:
        return replace(heart, excused_s=heart.excused_s + min(signs.elapsed_s, limits.hang_s))
    pulses = {
        rank: _stalled(pulse, signs, limits) if pulse.busy else pulse
        for rank, pulse in heart.pulses.items()
    }
    return replace(heart, pulses=pulses)


def _core_computes(before: Watching, signs: Signs) -> bool:
    """Whether the front is merely too busy to answer. A core that waits for it needs no CPU."""
    spent_s = {process.identity: process.cpu_s for process in before.processes or ()}
    computed_s = sum(
        process.cpu_s - spent_s.get(process.identity, process.cpu_s)
        for process in signs.processes or ()
        if process.role is ProcessRole.CORE
    )
    return computed_s > _COMPUTING_SHARE * signs.elapsed_s


def _pulse(sample: EngineSample, pulse: Pulse, signs: Signs, limits: DetectionLimits) -> Pulse:
    beat, steps = beat_of(sample), sample.fact(STEPS.name)
    paused = signs.pause is not None and signs.pause.polls_since == 0
    if beat is None or paused or not has_work(sample):
        return Pulse(beat=beat, steps=steps, beat_s=signs.clock_s)
    if beat != pulse.beat:
        step_s = _step_s(pulse, steps, signs.clock_s)
        return Pulse(beat=beat, steps=steps, beat_s=signs.clock_s, step_s=step_s, busy=True)
    return _stalled(pulse, signs, limits) if pulse.busy else replace(pulse, busy=True)


def _step_s(pulse: Pulse, steps: float | None, clock_s: float) -> float:
    """The recent time per step, in which a long one counts for a while."""
    faded = pulse.step_s * _STEP_DECAY
    if steps is None or pulse.steps is None or steps <= pulse.steps:
        return faded
    return max(faded, (clock_s - pulse.beat_s) / (steps - pulse.steps))


def _stalled(pulse: Pulse, signs: Signs, limits: DetectionLimits) -> Pulse:
    # However long the agent itself was away, one look is not enough to tell.
    waited_s = min(signs.elapsed_s, _patience_s(pulse, limits) / 2)
    return replace(pulse, stalled_s=pulse.stalled_s + waited_s)


def _stopped_polls(poll: Poll, before: Watching, signs: Signs) -> int:
    polls = before.heartbeat.stopped_polls
    if poll.host is None or poll.host.processes is None:
        return polls
    return polls + 1 if _stopped(signs) else 0


def _stopped(signs: Signs) -> list[str]:
    return [
        f"{process.name} ({process.pid})"
        for process in signs.processes or ()
        if process.stopped and process.role is not ProcessRole.OTHER
    ]


def _standing(heart: Heartbeat, limits: DetectionLimits) -> frozenset[str]:
    return frozenset(rank for rank, pulse in heart.pulses.items() if _stands(pulse, limits))


def _figures(heart: Heartbeat, limits: DetectionLimits) -> dict[str, str | float | None]:
    """What stands still, and for how long that which does so longest."""
    longest = max(heart.pulses.values(), key=lambda pulse: pulse.stalled_s, default=Pulse())
    return {
        "stalled_s": longest.stalled_s,
        "recent_step_s": longest.step_s or None,
        "ranks_standing": ", ".join(sorted(_standing(heart, limits))) or None,
    }


def _evidence(poll: Poll, before: Watching, signs: Signs) -> dict[str, str | float | None]:
    return {
        **before.last_figures(),
        **pause_noted(signs.pause),
        "page": poll.failure,
        "health": poll.health,
        "processes_stopped": ", ".join(_stopped(signs)) or None,
        "process_states": "".join(process.state for process in signs.processes or ()) or None,
    }
