"""The judgement of one poll: what happened, and what to remember for the next one."""

from dataclasses import replace

from agent.analysis.failures.beats import sleeps
from agent.analysis.failures.causes import CAUSE_KEYS, Case, kill_told, with_cause
from agent.analysis.failures.deaths import outage_after
from agent.analysis.failures.gpus import held_since_s
from agent.analysis.failures.hangs import heartbeat_after
from agent.analysis.failures.poll import HEALTHY, NO_CONNECTION, DetectionLimits, Poll
from agent.analysis.failures.pressures import pressures_after, sleep_begun
from agent.analysis.failures.signs import Signs, identities, read_signs
from agent.analysis.failures.state import Heartbeat, Outage, Watching
from agent.catalog.failure_lines import LineMeaning
from agent.records.engine import EngineSample
from agent.records.event import Confidence, Event, EventKind
from agent.records.host import ProcessRole

_USUAL_LIMITS = DetectionLimits()
_WORST_FIRST = tuple(EventKind)


def classify(
    poll: Poll, before: Watching, limits: DetectionLimits = _USUAL_LIMITS
) -> tuple[tuple[Event, ...], Watching]:
    """What happened to the engine, worst first, and the memory for the next poll.

    Each condition is told of once, when it begins; it can be told of again once it ended.
    """
    signs = read_signs(poll, before, limits)
    outage = outage_after(poll, before, signs, limits)
    pressing, active = pressures_after(poll, before, signs, limits)
    killed = kill_told(poll, before, signs, outage, active)
    outage = killed.named(outage, signs.clock_s)
    died, outage = with_cause(Case(poll, before, signs, limits, killed.active), outage)
    hanging, heartbeat = heartbeat_after(poll, before, signs, outage, limits)
    changed = (*_unreachable(poll, before, signs, outage), *_restarted(poll, before, signs, outage))
    events = (*killed.events, *died, *hanging, *changed, *pressing, *sleep_begun(poll, before))
    after = replace(
        _remembered(poll, before, signs),
        outage=outage,
        kills_untold=killed.untold,
        heartbeat=heartbeat,
        active=killed.active,
    )
    after = _anew(poll, after, signs) if signs.restart else after
    return tuple(sorted(events, key=lambda event: _WORST_FIRST.index(event.kind))), after


def _unreachable(
    poll: Poll, before: Watching, signs: Signs, outage: Outage | None
) -> tuple[Event, ...]:
    if not poll.unreachable or not before.reachable:
        return ()
    evidence = {
        "reason": poll.failure,
        **before.last_figures(),
        "stop_line": signs.stop_line,
        "cause": outage.cause if outage else None,
    }
    return (poll.event(EventKind.UNREACHABLE, Confidence.CERTAIN, evidence),)


def _restarted(
    poll: Poll, before: Watching, signs: Signs, outage: Outage | None
) -> tuple[Event, ...]:
    """Where nothing showed that the engine was gone, it was for no longer than between samples."""
    if poll.sample is None or signs.restart is None:
        return ()
    gone_since_s = before.outage.since_s if before.outage else before.sample_s
    evidence = {
        **before.last_figures(),
        "new_process_started_at": poll.sample.process_started_at,
        "gone_s": None if gone_since_s is None else signs.clock_s - gone_since_s,
        "stop_line": signs.stop_line,
        "cause": outage.cause if outage else None,
    }
    return (poll.event(EventKind.RESTART, signs.restart, evidence),)


def _remembered(poll: Poll, before: Watching, signs: Signs) -> Watching:
    """The memory after a poll, less what is judged elsewhere."""
    after = replace(
        before,
        clock_s=signs.clock_s,
        healthy=poll.failure != NO_CONNECTION and (before.healthy or poll.health == HEALTHY),
        processes=signs.processes,
        cgroup=signs.cgroup,
        node_oom_kills=signs.node_oom_kills,
        polls_since_node_kill=signs.polls_since_node_kill,
        pause=signs.pause,
        clues=signs.clues,
        gpus_held_since_s=held_since_s(poll, before),
        stopping=signs.stopping,
        front_ended=before.front_ended or _says_front_ended(poll),
    )
    if poll.sample is not None:
        return _with_sample(after, poll.sample, poll, signs)
    return replace(after, reachable=before.reachable and not poll.unreachable)


def _with_sample(after: Watching, sample: EngineSample, poll: Poll, signs: Signs) -> Watching:
    log = poll.host.log if poll.host else None
    return replace(
        after,
        sample=sample,
        sample_s=signs.clock_s,
        reachable=True,
        asleep=sleeps(sample),
        fronts=identities(signs, ProcessRole.FRONT) or after.fronts,
        cores=identities(signs, ProcessRole.CORE) or after.cores,
        # A log that tells of each answer that it gives would tell of a stop too.
        log_spoke=after.log_spoke if log is None else log.lines > 0,
        # Told to stop and gone, it is here again.
        stopping=after.stopping if after.reachable else None,
    )


def _anew(poll: Poll, after: Watching, signs: Signs) -> Watching:
    """The memory of an engine that began a new life with this poll."""
    return replace(
        after,
        outage=None,
        healthy=poll.health == HEALTHY,
        fronts=identities(signs, ProcessRole.FRONT),
        cores=identities(signs, ProcessRole.CORE),
        clues={},
        heartbeat=Heartbeat(),
        active={key: at_s for key, at_s in after.active.items() if key not in CAUSE_KEYS},
        pause=None,
        log_spoke=False,
        front_ended=False,
        stopping=None,
    )


def _says_front_ended(poll: Poll) -> bool:
    return any(finding.meaning is LineMeaning.FRONT_ENDED for finding in poll.findings)
