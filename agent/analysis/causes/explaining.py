"""Charges the excess seconds of one missed request to causes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agent.analysis.applied_limits import Excess, excesses
from agent.analysis.causes.engine_timeline import EngineTimeline
from agent.analysis.causes.evidence import seconds
from agent.analysis.causes.missed_case import MissedCase, Phase, PhaseTime
from agent.analysis.causes.rules import FAILURES, RULES
from agent.catalog.causes import Cause
from agent.records.engine_step import EndedRequest
from agent.records.explanation import CauseShare, Explanation
from agent.records.objective import Objective
from agent.records.request import RequestRecord

# Delays below are the noise of clocks.
_NOTHING_S = 1e-6
# A prompt that needs this part of the time to the first token alone is a long one.
_LONG_SHARE = 0.5


@dataclass(slots=True)
class _Charge:
    """Seconds of delay charged to one cause."""

    seconds: float = 0.0
    evidence: dict[str, None] = field(default_factory=dict)


def explain(
    record: RequestRecord,
    objectives: Iterable[Objective],
    timeline: EngineTimeline,
    ended: EndedRequest | None = None,
) -> Explanation:
    """Why a request missed these objectives.

    The shares of one objective and limit add up to its excess. `timeline` is that of the request's
    engine, and `ended` what the engine's plugin told of the request.
    """
    case = MissedCase(record, timeline, ended)
    by_objective = [
        [share for excess in excesses(record, each) for share in _shares(case, excess)]
        for each in objectives
    ]
    worst = max(by_objective, key=_excess_s, default=[])
    return Explanation(
        trace_id=record.trace_id,
        span_id=record.span_id,
        top=_top(worst),
        shares=tuple(share for shares in by_objective for share in shares),
        sources=_sources(case),
    )


def _excess_s(shares: Sequence[CauseShare]) -> float:
    return sum(share.excess_s or 0.0 for share in shares)


def _top(shares: Sequence[CauseShare]) -> Cause:
    totals: dict[Cause, float] = {}
    for share in shares:
        totals[share.cause] = totals.get(share.cause, 0.0) + (share.excess_s or 0.0)
    return max(totals, key=lambda cause: totals[cause], default=Cause.UNEXPLAINED)


def _sources(case: MissedCase) -> tuple[str, ...]:
    known = (
        ("plugin", case.ended is not None or "plugin" in (case.decode.source, case.prefill.source)),
        ("span", case.split),
        ("proxy", case.record.proxied is not None),
        ("samples", case.timeline.sampled_until >= case.record.ended_at),
    )
    return tuple(name for name, there in known if there)


def _shares(case: MissedCase, excess: Excess) -> list[CauseShare]:
    if excess.seconds is None:
        return [_failure(case, excess)]
    phases = case.phases(excess)
    charges: dict[Cause, _Charge] = {}
    for phase in phases:
        _charge(case, phase, charges)
    delay_s = sum(charge.seconds for charge in charges.values())
    over_s = excess.seconds - delay_s
    if over_s > 0:
        cause, text = _needed(excess, phases)
        _add(charges, cause, over_s, (text,))
    scale = min(1.0, excess.seconds / delay_s) if delay_s > 0 else 1.0
    return [
        CauseShare(
            excess.objective, excess.limit, cause, charge.seconds * scale, tuple(charge.evidence)
        )
        for cause, charge in charges.items()
    ]


def _charge(case: MissedCase, phase: PhaseTime, charges: dict[Cause, _Charge]) -> None:
    """Charge the delay of one phase: each rule claims of what the rules before it left."""
    left_s = phase.delay_s
    for rule in RULES[phase.phase]:
        if left_s <= _NOTHING_S:
            return
        claim = rule.claim(case, left_s)
        if claim is not None and claim.seconds > 0:
            claimed_s = min(left_s, claim.seconds)
            left_s -= claimed_s
            _add(charges, rule.cause, claimed_s, claim.evidence)
    if left_s > _NOTHING_S:
        _add(charges, Cause.UNEXPLAINED, left_s, _what_would_tell(case, phase))


def _add(
    charges: dict[Cause, _Charge], cause: Cause, added_s: float, evidence: Sequence[str]
) -> None:
    charge = charges.setdefault(cause, _Charge())
    charge.seconds += added_s
    charge.evidence.update(dict.fromkeys(evidence))


def _needed(excess: Excess, phases: Sequence[PhaseTime]) -> tuple[Cause, str]:
    """The cause of an excess that remains without any delay: such requests need that long."""
    needed_s = {phase.phase: phase.seconds - phase.delay_s for phase in phases}
    prefill_s = needed_s.get(Phase.PREFILL, 0.0)
    if prefill_s >= _LONG_SHARE * sum(needed_s.values()) > 0:
        return Cause.LONG_PROMPT, f"the prompt alone takes {seconds(prefill_s)} to compute"
    usual = ", ".join(f"{phase} {seconds(value)}" for phase, value in needed_s.items() if value)
    limit = f"{seconds(excess.limit_s or 0.0)} in all" if excess.limit == "tpot" else "the limit"
    return Cause.UNEXPLAINED, f"such requests always take more than {limit} ({usual or 'no delay'})"


def _failure(case: MissedCase, excess: Excess) -> CauseShare:
    for rule in FAILURES:
        if (claim := rule.claim(case, 0.0)) is not None:
            return CauseShare(excess.objective, excess.limit, rule.cause, None, claim.evidence)
    text = f"the request ended with status {case.record.status}, and nothing was seen of its engine"
    return CauseShare(excess.objective, excess.limit, Cause.UNEXPLAINED, None, (text,))


def _what_would_tell(case: MissedCase, phase: PhaseTime) -> tuple[str, ...]:
    period = case.decode if phase.phase is Phase.DECODE else case.front
    missing = (
        ("the engine's span", phase.phase is Phase.UNSPLIT),
        ("the engine's plugin", period.source != "plugin"),
        ("samples of the engine", period.source is None),
        ("the run delay of the engine's processes", period.core_wait_s is None),
        ("requests like this one", not case.usual.requests),
    )
    names = [name for name, is_missing in missing if is_missing]
    where = f"{seconds(phase.delay_s)} of delay in {phase.phase}"
    return (f"{where}; known would help: {', '.join(names) or 'nothing that the agent reads'}",)
