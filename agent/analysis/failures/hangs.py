"""Whether an engine hangs: it has work, it is awake, and its heartbeat stands still.

Data-parallel ranks are judged one by one: those that go on would hide one that does not.
"""

from collections.abc import Mapping
from dataclasses import replace

from agent.analysis.failures.beats import beat_of, has_work
from agent.analysis.failures.poll import TIMED_OUT, Limits, Poll
from agent.analysis.failures.signs import Signs
from agent.analysis.failures.state import Heartbeat, Outage, Pulse, Watching
from agent.catalog.engine_facts import STEPS
from agent.catalog.failure_lines import LineMeaning
from agent.records.engine import EngineSample
from agent.records.event import Confidence, Event, EventKind
from agent.records.host import ProcessRole

# Of the time, what a core spends on the CPU that is not merely waiting.
_COMPUTING_SHARE = 0.1
# A long step is forgotten within a few polls that showed shorter ones.
_STEP_DECAY = 0.8
# The key of an engine that is not told of by rank.
_WHOLE = ""
# A process that a signal stopped may be let go on at once.
_STOPPED_POLLS = 2


def heartbeat_after(
    poll: Poll, before: Watching, signs: Signs, outage: Outage | None, limits: Limits
) -> tuple[tuple[Event, ...], Heartbeat]:
    """The event of a hang that begins to show with this poll, and the heartbeat after it."""
    said = _hang_said(poll, before)
    if outage is not None and outage.dead is not None:
        return said, Heartbeat(reported=before.heartbeat.reported or bool(said))
    heart = Heartbeat(
        pulses=_felt(poll, before, signs, limits),
        stopped_polls=_stopped_polls(poll, before, signs),
        reported=before.heartbeat.reported,
    )
    if said:
        return said, replace(heart, reported=True)
    sure = _hangs(heart, limits)
    if sure is None or before.asleep:
        stalls = any(pulse.stalled_s > 0 for pulse in heart.pulses.values())
        return (), replace(heart, reported=heart.reported and stalls)
    if heart.reported:
        return (), heart
    evidence = _evidence(poll, before, signs) | _standing(heart, limits)
    event = poll.event(EventKind.HANG, sure, evidence)
    return (event,), replace(heart, reported=True)


def _hang_said(poll: Poll, before: Watching) -> tuple[Event, ...]:
    """A hang that the engine itself gave up on."""
    lines = [found.line for found in poll.findings if found.meaning is LineMeaning.HANG]
    if not lines or before.heartbeat.reported:
        return ()
    evidence = {**before.last_figures(), "log_line": lines[0]}
    return (poll.event(EventKind.HANG, Confidence.CERTAIN, evidence),)


def _hangs(heart: Heartbeat, limits: Limits) -> Confidence | None:
    if heart.stopped_polls >= _STOPPED_POLLS:
        return Confidence.CERTAIN
    stands = any(_stands(pulse, limits) for pulse in heart.pulses.values())
    return Confidence.PROBABLE if stands else None


def _stands(pulse: Pulse, limits: Limits) -> bool:
    return pulse.stalled_s > _patience_s(pulse, limits)


def _patience_s(pulse: Pulse, limits: Limits) -> float:
    return max(limits.hang_s, limits.hang_steps * pulse.step_s)


def _felt(poll: Poll, before: Watching, signs: Signs, limits: Limits) -> Mapping[str, Pulse]:
    pulses = before.heartbeat.pulses
    if poll.sample is None:
        return _unanswered(poll, before, signs, limits)
    ranks = poll.sample.ranks or {_WHOLE: poll.sample}
    return {
        rank: _pulse(sample, pulses.get(rank, Pulse()), signs, limits)
        for rank, sample in ranks.items()
    }


def _unanswered(poll: Poll, before: Watching, signs: Signs, limits: Limits) -> Mapping[str, Pulse]:
    """A front that lives and does not answer has the work that it had."""
    pulses = before.heartbeat.pulses
    waits = poll.failure == TIMED_OUT and signs.front_alive is True
    if not waits or _core_computes(before, signs):
        return pulses
    return {
        rank: _stalled(pulse, signs, limits) if pulse.busy else pulse
        for rank, pulse in pulses.items()
    }


def _core_computes(before: Watching, signs: Signs) -> bool:
    """Whether the front is merely too busy to answer. A core that waits for it needs no CPU."""
    spent_s = {process.identity: process.cpu_s for process in before.processes or ()}
    computed_s = sum(
        process.cpu_s - spent_s.get(process.identity, process.cpu_s)
        for process in signs.processes or ()
        if process.role is ProcessRole.CORE
    )
    return computed_s > _COMPUTING_SHARE * signs.elapsed_s


def _pulse(sample: EngineSample, pulse: Pulse, signs: Signs, limits: Limits) -> Pulse:
    beat, steps = beat_of(sample), sample.fact(STEPS.name)
    paused = signs.polls_since_pause == 0
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


def _stalled(pulse: Pulse, signs: Signs, limits: Limits) -> Pulse:
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


def _standing(heart: Heartbeat, limits: Limits) -> dict[str, str | float | None]:
    """What stands still, and for how long that which does so longest."""
    longest = max(heart.pulses.values(), key=lambda pulse: pulse.stalled_s, default=Pulse())
    ranks = sorted(rank for rank, pulse in heart.pulses.items() if _stands(pulse, limits))
    return {
        "stalled_s": longest.stalled_s,
        "recent_step_s": longest.step_s or None,
        "ranks_standing": ", ".join(ranks) or None,
    }


def _evidence(poll: Poll, before: Watching, signs: Signs) -> dict[str, str | float | None]:
    return {
        **before.last_figures(),
        "page": poll.failure,
        "health": poll.health,
        "processes_stopped": ", ".join(_stopped(signs)) or None,
        "process_states": "".join(process.state for process in signs.processes or ()) or None,
    }
