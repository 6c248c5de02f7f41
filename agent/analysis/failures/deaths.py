"""Whether an engine died: the signs of a death, and the outage that they open or end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agent.analysis.failures.evidence import of_death
from agent.analysis.failures.poll import DetectionLimits, Poll
from agent.analysis.failures.signs import Signs, is_back
from agent.analysis.failures.state import Outage, Watching
from agent.catalog.failure_lines import SAY_THAT_THEY_END, UNHEALTHY_ONLY_WHEN_DEAD
from agent.records.event import Confidence

_SURENESS = (Confidence.SUSPECTED, Confidence.PROBABLE, Confidence.CERTAIN)
# So long an engine may take to change its number of ranks.
_RESCALING_TAKES_S = 600.0


@dataclass(frozen=True, slots=True)
class Death:
    """One sign of a death. A `firm` one cannot be that of a normal stop or of a passing fault."""

    confidence: Confidence
    firm: bool


def _said_by_log(poll: Poll, before: Watching, signs: Signs) -> Death | None:
    return Death(Confidence.CERTAIN, firm=True) if signs.death_line else None


def _said_by_health(poll: Poll, before: Watching, signs: Signs) -> Death | None:
    if not signs.unhealthy:
        return None
    sample = poll.sample or before.sample
    if sample is not None and sample.dialect in UNHEALTHY_ONLY_WHEN_DEAD:
        lived = before.healthy or poll.sample is not None
        gone = signs.front_alive is False or signs.core_alive is False
        # One that changes how many ranks it has answers everything with 503, its page too (vLLM
        # `entrypoints/serve/elastic_ep/middleware.py`); the front of a dead one serves its page.
        if lived and (gone or not poll.unreachable):
            return Death(Confidence.PROBABLE, firm=True)
        ended = lived and _out_long(before, signs)
    else:
        ended = before.healthy and _stands(poll, before)
    return Death(Confidence.SUSPECTED, firm=False) if ended else None


def _out_long(before: Watching, signs: Signs) -> bool:
    """Whether the engine was not had for longer than any change of its ranks takes."""
    outage = before.outage
    return outage is not None and signs.clock_s - outage.since_s > _RESCALING_TAKES_S


def _stands(poll: Poll, before: Watching) -> bool:
    """Whether no figure of the page moved: what finishes its requests before it stops moves some.

    An engine need not count its steps for that.
    """
    if poll.sample is None or before.sample is None:
        return False
    return poll.sample.facts == before.sample.facts


def _front_lost(poll: Poll, before: Watching, signs: Signs) -> Death | None:
    """In a normal stop the front is the last to go."""
    if signs.front_alive is not False:
        return None
    if signs.core_alive:
        return Death(Confidence.PROBABLE, firm=True)
    # A worker may take a moment longer than its core to end.
    return Death(Confidence.PROBABLE, firm=False) if signs.worker_alive else None


def _core_lost(poll: Poll, before: Watching, signs: Signs) -> Death | None:
    headless = signs.front_alive is True and signs.core_alive is False
    return Death(Confidence.PROBABLE, firm=False) if headless else None


def _fell_silent(poll: Poll, before: Watching, signs: Signs) -> Death | None:
    """What is killed outright says nothing, and a stop would have been told of."""
    says_so = before.sample is not None and before.sample.dialect in SAY_THAT_THEY_END
    if not says_so or not signs.log_silent or signs.front_alive is True:
        return None
    seen_gone = signs.front_alive is False
    return Death(Confidence.PROBABLE if seen_gone else Confidence.SUSPECTED, firm=False)


_SIGNS: Sequence[Callable[[Poll, Watching, Signs], Death | None]] = (
    _said_by_log,
    _said_by_health,
    _front_lost,
    _core_lost,
    _fell_silent,
)


def outage_after(
    poll: Poll, before: Watching, signs: Signs, limits: DetectionLimits
) -> Outage | None:
    """The outage that this poll leaves the engine in; None while it is well."""
    outage = None if is_back(poll, before, signs) else before.outage
    if poll.unreachable:
        outage = replace(outage or Outage(since_s=signs.clock_s), unreachable=True)
    deaths = [] if signs.stopping else [sign(poll, before, signs) for sign in _SIGNS]
    found = [death for death in deaths if death is not None]
    if found:
        return _died(outage or Outage(since_s=signs.clock_s), found, signs, limits)
    return None if outage is None else _not_died_now(outage)


def _died(outage: Outage, deaths: Sequence[Death], signs: Signs, limits: DetectionLimits) -> Outage:
    if signs.start_failed and _another_start(outage, signs, limits):
        outage = replace(outage, cause=None, dead=None, firm=False, evidence={})
    confidence = max((death.confidence for death in deaths), key=_SURENESS.index)
    firm = any(death.firm for death in deaths)
    if outage.dead is None:
        return replace(
            outage, dead=confidence, firm=firm, polls_dead=0, at_start=signs.start_failed
        )
    # No stop and no passing fault looks the same one poll later.
    if firm and outage.firm:
        confidence = Confidence.CERTAIN
    return replace(
        outage,
        dead=max(confidence, outage.dead, key=_SURENESS.index),
        firm=firm or outage.firm,
        polls_dead=outage.polls_dead + 1,
        at_start=outage.at_start or signs.start_failed,
    )


def _another_start(outage: Outage, signs: Signs, limits: DetectionLimits) -> bool:
    """Whether a start failed after the death that was already told of."""
    return outage.cause is not None and signs.clock_s - outage.named_s > limits.clue_s


def _not_died_now(outage: Outage) -> Outage | None:
    """An outage without a new sign of death: a firm one lasts, any other was a mistake."""
    if outage.firm:
        return replace(outage, polls_dead=outage.polls_dead + 1)
    if outage.dead is not None:
        outage = replace(outage, dead=None)
    return outage if outage.unreachable else None


def noted(outage: Outage, poll: Poll, before: Watching, signs: Signs) -> Outage:
    """The outage with what this poll showed of it, kept for the event that comes later."""
    started = {"at_start": 1.0} if outage.at_start else {}
    # What was seen first is nearest to the death.
    seen = {**of_death(poll, before, signs), **started, **outage.evidence}
    return replace(outage, evidence=seen)
