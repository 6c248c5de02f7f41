"""Whether an engine hangs: it has work, it is awake, and its heartbeat stands still."""

from dataclasses import replace

from agent.analysis.failures.beats import beat_of, has_work
from agent.analysis.failures.poll import TIMED_OUT, Limits, Poll
from agent.analysis.failures.signs import Signs
from agent.analysis.failures.state import Heartbeat, Outage, Watching
from agent.catalog.engine_facts import STEPS
from agent.catalog.failure_lines import LineMeaning
from agent.records.engine import EngineSample
from agent.records.event import Confidence, Event, EventKind
from agent.records.host import ProcessRole

# A long step is forgotten within a few polls that showed shorter ones.
_STEP_DECAY = 0.8
# A process that a signal stopped may be let go on at once.
_STOPPED_POLLS = 2


def heartbeat_after(
    poll: Poll, before: Watching, signs: Signs, outage: Outage | None, limits: Limits
) -> tuple[tuple[Event, ...], Heartbeat]:
    """The event of a hang that begins to show with this poll, and the heartbeat after it."""
    said = _hang_said(poll, before)
    if outage is not None and outage.dead is not None:
        return said, Heartbeat(reported=before.heartbeat.reported or bool(said))
    heart = replace(
        _felt(poll, before, signs, limits),
        stopped_polls=_stopped_polls(poll, before, signs),
        reported=before.heartbeat.reported,
    )
    if said:
        return said, replace(heart, reported=True)
    sure = _hangs(heart, limits)
    if sure is None or before.asleep:
        return (), replace(heart, reported=heart.reported and heart.stalled_s > 0)
    if heart.reported:
        return (), heart
    event = poll.event(EventKind.HANG, sure, _evidence(poll, before, signs, heart))
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
    return Confidence.PROBABLE if heart.stalled_s > _patience_s(heart, limits) else None


def _patience_s(heart: Heartbeat, limits: Limits) -> float:
    return max(limits.hang_s, limits.hang_steps * heart.step_s)


def _felt(poll: Poll, before: Watching, signs: Signs, limits: Limits) -> Heartbeat:
    heart = before.heartbeat
    if poll.sample is None:
        # A front that lives and does not answer has the work that it had.
        waits = poll.failure == TIMED_OUT and signs.front_alive is True
        return _stalled(heart, signs, limits) if waits and heart.busy else heart
    beat = beat_of(poll.sample)
    if beat is None or not has_work(poll.sample):
        return Heartbeat(beat=beat, steps=_steps(poll.sample), beat_s=signs.clock_s)
    if beat != heart.beat:
        return _beaten(poll.sample, heart, signs)
    return _stalled(heart, signs, limits) if heart.busy else replace(heart, busy=True)


def _beaten(sample: EngineSample, heart: Heartbeat, signs: Signs) -> Heartbeat:
    steps = _steps(sample)
    return Heartbeat(
        beat=beat_of(sample),
        steps=steps,
        beat_s=signs.clock_s,
        step_s=_step_s(heart, steps, signs.clock_s),
        busy=True,
    )


def _step_s(heart: Heartbeat, steps: float | None, clock_s: float) -> float:
    """The recent time per step, in which a long one counts for a while."""
    faded = heart.step_s * _STEP_DECAY
    if steps is None or heart.steps is None or steps <= heart.steps:
        return faded
    return max(faded, (clock_s - heart.beat_s) / (steps - heart.steps))


def _stalled(heart: Heartbeat, signs: Signs, limits: Limits) -> Heartbeat:
    # However long the agent itself was away, one look is not enough to tell.
    waited_s = min(signs.elapsed_s, _patience_s(heart, limits) / 2)
    return replace(heart, stalled_s=heart.stalled_s + waited_s)


def _steps(sample: EngineSample) -> float | None:
    return sample.fact(STEPS.name)


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


def _evidence(
    poll: Poll, before: Watching, signs: Signs, heart: Heartbeat
) -> dict[str, str | float | None]:
    return {
        **before.last_figures(),
        "stalled_s": heart.stalled_s,
        "recent_step_s": heart.step_s or None,
        "page": poll.failure,
        "health": poll.health,
        "processes_stopped": ", ".join(_stopped(signs)) or None,
        "process_states": "".join(process.state for process in signs.processes or ()) or None,
    }
