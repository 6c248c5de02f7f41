"""The state of an engine at each poll, for probes: what the other detectors found, in one word.

An engine is dead or stalled if an event says so that is more than suspected, or if it has not
responded for as long as the alert on an engine that is down waits.
"""

from collections.abc import Iterable

from agent.analysis.failures.hangs import core_computes
from agent.analysis.failures.poll import HEALTHY, ComparedPoll, DetectionLimits, Findings
from agent.analysis.failures.progress import sleeps
from agent.catalog.definitions import DEEP_QUEUE
from agent.catalog.engine_facts import ADMISSION_REJECTIONS, REQUESTS_RUNNING, REQUESTS_WAITING
from agent.catalog.engine_states import ProbedState
from agent.catalog.reasons import NO_ANSWER
from agent.records.engine import EngineSample, EngineStatus
from agent.records.event import Event, EventKind

# An engine that does not respond for so many times `hang_s` is dead, whatever the reason.
_AWAY_HANGS = 4

# A state, and the event or the failure of the poll behind it.
_StateAndReason = tuple[ProbedState, str | None]


class StateDetector:
    """Finds the state of the engine, and since when it has it."""

    def __init__(self, limits: DetectionLimits) -> None:
        self._away_s = _AWAY_HANGS * limits.hang_s
        self._was_healthy = False
        self._was_there = False
        self._status: EngineStatus | None = None

    def observe(self, seen: ComparedPoll, found: Findings) -> Iterable[Event]:
        """Find the state after this poll."""
        was_healthy = self._was_healthy and seen.restart is None
        self._was_healthy = was_healthy or seen.poll.health == HEALTHY
        self._was_there = self._was_there or _is_there(seen)
        state, why = self._state(seen, found)
        at, last = seen.poll.at, self._status
        since = at if last is None or last.state is not state else last.since
        found.status = self._status = EngineStatus(state=state, since=since, read_at=at, why=why)
        return ()

    def _state(self, seen: ComparedPoll, found: Findings) -> _StateAndReason:
        poll, outage = seen.poll, found.outage
        if seen.starts:
            return ProbedState.LOADING, poll.failure
        if outage is not None and outage.reported_dead and seen.restart is None:
            return ProbedState.DEAD, outage.cause
        if found.hangs:
            return ProbedState.STALLED, EventKind.HANG
        if poll.unreachable:
            return self._away(seen, since_s=poll.clock_s if outage is None else outage.since_s)
        if poll.health not in (None, HEALTHY):
            lost = ProbedState.UNREACHABLE if self._was_healthy else ProbedState.LOADING
            return lost, f"http_{poll.health}"
        if poll.sample is None:
            # It responds, and only its metrics cannot be read.
            return ProbedState.OK, poll.failure
        return _working(seen.before, poll.sample, paused=found.paused), None

    def _away(self, seen: ComparedPoll, *, since_s: float) -> _StateAndReason:
        """The state of an engine that does not respond."""
        failure = seen.poll.failure
        if seen.before_s is None:
            # Nothing may ever have been at this address, such as one with a typing error.
            never = ProbedState.LOADING if self._was_there else ProbedState.UNREACHABLE
            return never, failure
        if seen.poll.clock_s - since_s > self._away_s and not core_computes(seen):
            return ProbedState.DEAD, failure
        return ProbedState.UNREACHABLE, failure


def _is_there(seen: ComparedPoll) -> bool:
    """Whether a response, a process, the log or an earlier run's sample shows the engine."""
    poll, host = seen.poll, seen.poll.host
    responds = poll.failure not in NO_ANSWER or poll.health is not None
    has_log = host is not None and host.log is not None and host.log.lines > 0
    return responds or bool(poll.processes) or has_log or seen.before is not None


def _working(before: EngineSample | None, now: EngineSample, *, paused: bool) -> ProbedState:
    """The state of an engine that responds and does not hang."""
    running, waiting = now.fact(REQUESTS_RUNNING.name), now.fact(REQUESTS_WAITING.name)
    if paused or sleeps(now):
        return ProbedState.PAUSED
    if (waiting or 0) > DEEP_QUEUE or _rejects(before, now):
        return ProbedState.SATURATED
    return ProbedState.IDLE if running == waiting == 0 else ProbedState.OK


def _rejects(before: EngineSample | None, now: EngineSample) -> bool:
    """Whether the engine rejected requests since the sample before."""
    rejections = [key for key in now.facts if key[0] == ADMISSION_REJECTIONS.name]
    return before is not None and any(
        now.facts[key] > before.facts.get(key, 0.0) for key in rejections
    )
