"""Charges the excess seconds of one missed request to causes."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import compress

from agent.analysis.causes.engine_rules import seconds
from agent.analysis.causes.engine_timeline import EngineTimeline
from agent.analysis.causes.missed_case import MissedCase, Phase, PhaseTime
from agent.analysis.causes.rules import FAILURES, rules_of
from agent.analysis.verdicts import E2E, Excess, excesses
from agent.catalog.causes import Cause
from agent.records.engine import EndedRequest
from agent.records.objective import CauseShare, Explanation, Objective
from agent.records.request import RequestRecord

# A delay below this share of the excess is noise of clocks.
_NOISE_SHARE = 0.01
# A prompt or a response is long if it needs at least this share of all needed time.
_LONG_SHARE = 0.5

_SOURCES = ("plugin", "span", "proxy", "samples")

# The seconds charged to a cause, and the evidence.
_Charge = tuple[float, tuple[str, ...]]
_Claimed = tuple[Cause, float, tuple[str, ...]]
_Charged = dict[PhaseTime, list[_Claimed]]


def explain(
    record: RequestRecord,
    objectives: Iterable[Objective],
    timeline: EngineTimeline,
    ended: EndedRequest | None = None,
) -> Explanation:
    """The explanation of why a request missed these objectives.

    The seconds of the shares of one objective and limit add up to its excess. `timeline` is the
    timeline of the request's engine, `ended` the request as the engine's plugin reported it.
    """
    case = MissedCase(record, timeline, ended)
    known: _Charged = {}
    shares: list[CauseShare] = []
    worst: Sequence[CauseShare] = ()
    for objective in objectives:
        own: list[CauseShare] = []
        for excess in excesses(record, objective):
            own += _shares(case, excess, known)
        shares += own
        if not worst or _excess_s(own) > _excess_s(worst):
            worst = own
    return Explanation(
        trace_id=record.trace_id,
        span_id=record.span_id,
        top=_top(worst),
        shares=tuple(shares),
        sources=_sources(case),
    )


def _excess_s(shares: Sequence[CauseShare]) -> float:
    return sum(share.excess_s or 0.0 for share in shares)


def _top(shares: Sequence[CauseShare]) -> Cause:
    totals: defaultdict[Cause, float] = defaultdict(float)
    for share in shares:
        totals[share.cause] += share.excess_s or 0.0
    return max(totals, key=totals.__getitem__, default=Cause.UNEXPLAINED)


def _sources(case: MissedCase) -> tuple[str, ...]:
    there = (
        case.ended is not None or _has_steps(case),
        case.split,
        case.record.proxied is not None,
        case.timeline.sampled.until >= case.record.ended_at,
    )
    return tuple(compress(_SOURCES, there))


def _has_steps(case: MissedCase) -> bool:
    if not case.timeline.has_steps:
        return False
    return case.decode.source == "plugin" or case.prefill.source == "plugin"


def _shares(case: MissedCase, excess: Excess, known: _Charged) -> list[CauseShare]:
    excess_s = excess.seconds
    if excess_s is None:
        return [_failure(case, excess)]
    phases = case.phases(excess)
    noise_s = _NOISE_SHARE * excess_s
    charges: dict[Cause, _Charge] = {}
    delay_s = 0.0
    for phase in phases:
        if phase.seconds - phase.needed_s <= noise_s:
            continue
        # Several limits have this phase, and its claims are the same for all.
        claims = known.get(phase)
        if claims is None:
            claims = known[phase] = _charged(case, phase)
        for cause, claimed_s, evidence in claims:
            delay_s += claimed_s
            _charge(charges, cause, claimed_s, evidence)
    over_s = excess_s - delay_s
    if over_s > len(phases) * noise_s:
        cause, text = _needed(case, excess, phases)
        _charge(charges, cause, over_s, (text,))
        delay_s = excess_s
    scale = excess_s / delay_s
    objective, limit = excess.objective, excess.limit
    return [
        CauseShare(objective, limit, cause, charged_s * scale, evidence)
        for cause, (charged_s, evidence) in charges.items()
    ]


def _charged(case: MissedCase, phase: PhaseTime) -> list[_Claimed]:
    """The delay of one phase by cause. A rule claims of the seconds that earlier rules left."""
    left_s = phase.seconds - phase.needed_s
    noise_s = _NOISE_SHARE * left_s
    claims: list[_Claimed] = []
    for cause, rule in rules_of(phase.phase, case.signs):
        claim = rule(case, left_s)
        if claim is None or claim.seconds <= 0:
            continue
        claimed_s = min(left_s, claim.seconds)
        left_s -= claimed_s
        claims.append((cause, claimed_s, claim.evidence))
        if left_s <= noise_s:
            return claims
    claims.append((Cause.UNEXPLAINED, left_s, _missing_evidence(case, phase)))
    return claims


def _charge(
    charges: dict[Cause, _Charge], cause: Cause, claimed_s: float, evidence: tuple[str, ...]
) -> None:
    """Add a claim to the charge of its cause; each sentence of evidence stays once."""
    if cause in charges:
        before_s, known = charges[cause]
        claimed_s += before_s
        evidence = known + tuple([each for each in evidence if each not in known])
    charges[cause] = claimed_s, evidence


def _needed(case: MissedCase, excess: Excess, phases: Sequence[PhaseTime]) -> tuple[Cause, str]:
    """The cause and evidence of an excess without delay: such requests need so many seconds."""
    needed_s = {phase.phase: min(phase.seconds, phase.needed_s) for phase in phases}
    prefill_s, decode_s = needed_s.get(Phase.PREFILL, 0.0), needed_s.get(Phase.DECODE, 0.0)
    long_s = _LONG_SHARE * sum(needed_s.values())
    if prefill_s >= long_s > 0:
        return Cause.LONG_PROMPT, f"the prompt alone takes {seconds(prefill_s)} to compute"
    tokens, usual_tokens = case.record.output_tokens or 0, case.usual.output_tokens
    # If responses of the usual length break the limit, the length of this one is not the cause.
    if excess.limit == E2E and decode_s >= long_s > 0 and tokens > (usual_tokens or tokens):
        return Cause.LONG_OUTPUT, (
            f"{tokens:,} tokens alone take {seconds(decode_s)} to generate, and a response "
            f"usually has {usual_tokens:,.0f}"
        )
    usual = ", ".join([f"{phase} {seconds(value)}" for phase, value in needed_s.items() if value])
    limit = f"{seconds(excess.limit_s or 0.0)} in all" if excess.limit == "tpot" else "the limit"
    return Cause.UNEXPLAINED, f"such requests always take more than {limit} ({usual or 'no delay'})"


def _failure(case: MissedCase, excess: Excess) -> CauseShare:
    for rule in FAILURES:
        if (claim := rule.claim(case, 0.0)) is not None:
            return CauseShare(excess.objective, excess.limit, rule.cause, None, claim.evidence)
    text = f"the request ended with status {case.record.status}, and nothing was seen of its engine"
    return CauseShare(excess.objective, excess.limit, Cause.UNEXPLAINED, None, (text,))


def _missing_evidence(case: MissedCase, phase: PhaseTime) -> tuple[str, ...]:
    period = case.decode if phase.phase is Phase.DECODE else case.prefill
    waits = case.timeline.processor_waits.lost_s(period.start, period.end)
    missing = _named(
        phase.phase is Phase.UNSPLIT,
        period.source != "plugin",
        period.source is None,
        waits is None,
        not case.usual.requests,
    )
    delay_s = phase.seconds - phase.needed_s
    return (f"{seconds(delay_s)} of delay in {phase.phase}; it would help to know {missing}",)


@cache
def _named(*missing: bool) -> str:
    """The names of the missing sources; one flag for each of _EVIDENCE_SOURCES."""
    return ", ".join(compress(_EVIDENCE_SOURCES, missing)) or "nothing that the agent reads"


_EVIDENCE_SOURCES = (
    "the engine's span",
    "the engine's plugin",
    "samples of the engine",
    "the run delay of the engine's processes",
    "requests like this one",
)
