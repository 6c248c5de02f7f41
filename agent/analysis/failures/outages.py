"""Whether an engine is out of reach or dead: the evidence of a death, and when an outage ends."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from agent.analysis.failures.compared_poll import ComparedPoll
from agent.analysis.failures.findings import Findings, Outage
from agent.analysis.failures.poll import HEALTHY, NO_CONNECTION, UNHEALTHY, DetectionLimits
from agent.catalog.failure_lines import SAY_THAT_THEY_END, UNHEALTHY_ONLY_WHEN_DEAD, LineMeaning
from agent.records.event import Confidence, Event
from agent.records.host import ProcessRole

_CONFIDENCES = (Confidence.SUSPECTED, Confidence.PROBABLE, Confidence.CERTAIN)
# An engine may take so long to change its number of ranks.
_RESCALING_TAKES_S = 600.0


@dataclass(frozen=True, slots=True)
class _DeathEvidence:
    """One piece of evidence of a death. A `firm` one lasts through polls without evidence."""

    confidence: Confidence
    firm: bool


class OutageDetector:
    """Finds the outage of the engine. `DeathDetector` reports why the engine died."""

    def __init__(self, limits: DetectionLimits) -> None:
        self._limits = limits
        self._healthy = False
        self._polls_since_line: int | None = None
        self._front_ended = False

    def observe(self, seen: ComparedPoll, found: Findings) -> tuple[Event, ...]:
        """Find the outage that lasts after this poll."""
        found.outage = self._outage(seen, stopped=found.stop_line is not None)
        self._remember(seen)
        return ()

    def _outage(self, seen: ComparedPoll, *, stopped: bool) -> Outage | None:
        outage = None if _is_back(seen) else seen.outage
        new = Outage(since_s=seen.poll.clock_s)
        if seen.poll.unreachable:
            outage = replace(outage or new, unreachable=True)
        deaths = [] if stopped else list(self._deaths(seen))
        if deaths:
            return self._with_deaths(outage or new, deaths, seen)
        return _without_deaths(outage) if outage else None

    def _deaths(self, seen: ComparedPoll) -> Iterator[_DeathEvidence]:
        """All evidence of a death that this poll gives."""
        if seen.death_line:
            yield _DeathEvidence(Confidence.CERTAIN, firm=True)
        # The health of a restarted engine is no evidence about the one before.
        if seen.poll.health == UNHEALTHY and seen.restart is None:
            yield from self._by_health(seen)
        if seen.front_alive is False:
            yield from _by_lost_front(seen)
        if seen.front_alive is True and seen.core_alive is False:
            yield _DeathEvidence(Confidence.PROBABLE, firm=False)
        yield from self._by_silent_log(seen)

    def _by_health(self, seen: ComparedPoll) -> Iterator[_DeathEvidence]:
        sample = seen.poll.sample or seen.before
        if sample is None or sample.dialect not in UNHEALTHY_ONLY_WHEN_DEAD:
            # An engine that finishes its requests before it stops changes some facts.
            now, then = seen.poll.sample, seen.before
            if self._healthy and now and then and now.facts == then.facts:
                yield _DeathEvidence(Confidence.SUSPECTED, firm=False)
            return
        if not self._healthy and seen.poll.sample is None:
            return
        gone = seen.front_alive is False or seen.core_alive is False
        # A vLLM that changes its number of ranks answers everything with 503, its metrics too
        # (`entrypoints/serve/elastic_ep/middleware.py`). The front of a dead one serves metrics.
        if gone or not seen.poll.unreachable:
            yield _DeathEvidence(Confidence.PROBABLE, firm=True)
        elif seen.outage and seen.poll.clock_s - seen.outage.since_s > _RESCALING_TAKES_S:
            yield _DeathEvidence(Confidence.SUSPECTED, firm=False)

    def _by_silent_log(self, seen: ComparedPoll) -> Iterator[_DeathEvidence]:
        """A killed engine logs nothing, a normal stop would be logged."""
        logs_ends = seen.before is not None and seen.before.dialect in SAY_THAT_THEY_END
        if not logs_ends or not self._log_active() or self._front_ended:
            return
        if seen.poll.failure == NO_CONNECTION and seen.poll.host and seen.poll.host.log:
            if seen.front_alive is False:
                yield _DeathEvidence(Confidence.PROBABLE, firm=False)
            elif seen.front_alive is None:
                yield _DeathEvidence(Confidence.SUSPECTED, firm=False)

    def _log_active(self) -> bool:
        """Whether the log had a line at one of the last two polls that the engine answered.

        A log that holds a line for each response to the agent would hold a stop, too. An engine
        on a busy machine may write the line of one poll only after the agent has read the log.
        """
        return self._polls_since_line is not None and self._polls_since_line <= 1

    def _with_deaths(
        self, outage: Outage, deaths: Sequence[_DeathEvidence], seen: ComparedPoll
    ) -> Outage:
        failed = any(seen.poll.lines(LineMeaning.START_FAILED))
        named_ago_s = seen.poll.clock_s - outage.named_s
        if failed and outage.cause is not None and named_ago_s > self._limits.clue_s:
            # Another start failed after the death that was reported.
            outage = replace(outage, cause=None, dead=None, firm=False, evidence={})
        confidence = max((death.confidence for death in deaths), key=_CONFIDENCES.index)
        firm = any(death.firm for death in deaths)
        if outage.dead is None:
            return replace(outage, dead=confidence, firm=firm, polls_dead=0, at_start=failed)
        # Neither a stop nor a passing fault gives firm evidence twice.
        if firm and outage.firm:
            confidence = Confidence.CERTAIN
        return replace(
            outage,
            dead=max(confidence, outage.dead, key=_CONFIDENCES.index),
            firm=firm or outage.firm,
            polls_dead=outage.polls_dead + 1,
            at_start=outage.at_start or failed,
        )

    def _remember(self, seen: ComparedPoll) -> None:
        poll = seen.poll
        was_healthy = self._healthy and seen.restart is None
        self._healthy = poll.failure != NO_CONNECTION and (was_healthy or poll.health == HEALTHY)
        if poll.sample is not None and poll.host is not None and poll.host.log is not None:
            if poll.host.log.lines:
                self._polls_since_line = 0
            elif self._polls_since_line is not None:
                self._polls_since_line += 1
        self._front_ended = self._front_ended or any(poll.lines(LineMeaning.FRONT_ENDED))
        if seen.restart:
            self._polls_since_line, self._front_ended = None, False


def _is_back(seen: ComparedPoll) -> bool:
    """Whether the engine is well again after an outage, without a restart."""
    if seen.outage is None or seen.poll.sample is None or seen.restart or seen.death_line:
        return False
    return seen.well or (seen.poll.health is None and seen.outage.unreachable)


def _by_lost_front(seen: ComparedPoll) -> Iterator[_DeathEvidence]:
    """In a normal stop the front ends last, but a worker may end a moment after its core."""
    if seen.core_alive:
        yield _DeathEvidence(Confidence.PROBABLE, firm=True)
    elif any(process.role is ProcessRole.WORKER for process in seen.poll.processes or ()):
        yield _DeathEvidence(Confidence.PROBABLE, firm=False)


def _without_deaths(outage: Outage) -> Outage | None:
    """The outage after a poll without evidence of a death: only a firm death lasts."""
    if outage.firm:
        return replace(outage, polls_dead=outage.polls_dead + 1)
    return replace(outage, dead=None) if outage.unreachable else None
