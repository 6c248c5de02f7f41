"""Charges the excess seconds of a missed request to causes, by the rules of each phase.

Rules claim a phase's delay in their order; a new rule needs a line. Rules of the queue and of steps
are in their own modules. Here are those of the time outside the engine's core, and those of failed
requests.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from itertools import compress
from typing import NamedTuple

import msgspec

from agent.analysis.causes import queue_rules, step_rules
from agent.analysis.causes.baselines import hold_back_of
from agent.analysis.causes.engine_rules import (
    core_waited,
    front_waited,
    front_waited_in_stream,
    gpu_slowed,
    request_cold,
    seconds,
    stalled,
)
from agent.analysis.causes.engine_timeline import EngineTimeline
from agent.analysis.causes.missed_case import Claim, MissedCase, Phase, PhaseTime, Sign
from agent.analysis.verdicts import E2E, Excess, excesses
from agent.catalog.causes import Cause
from agent.catalog.reasons import ProxyFailure
from agent.records.engine import EndedRequest
from agent.records.objective import CauseShare, Explanation, Objective
from agent.records.request import RequestRecord, Status

# A shorter delay is noise of clocks and event loops.
_SHORTEST_S = 0.01
# The core is in a step, or ends one, for fewer than this many steps.
_FEW_STEPS = 2
# A poll finds a death after the requests broke. Its event counts for requests that ran at most this
# long before or after it.
_SEEN_WITHIN_S = 15.0
_SERVER_ERROR = 500
_UNAVAILABLE = 503


def tokenising(case: MissedCase, left_s: float) -> Claim | None:
    """The engine took long before its queue: it renders and tokenises the prompt there."""
    usual_s = case.usual.front_s
    if left_s < _SHORTEST_S or usual_s is None:
        return None
    if not case.timeline.fronts_were_late(case.queued_at, left_s) or _step_under_way(case):
        return None
    front_s = case.queued_at - case.arrived_at
    text = (
        f"the engine's front took {seconds(front_s)} ({_engine_source(case)}), usually "
        f"{seconds(usual_s)} "
        "for prompts of this length"
    )
    return Claim(left_s, (text,))


def _step_under_way(case: MissedCase) -> bool:
    """Whether a single step ran meanwhile: the core takes requests between two steps."""
    front = case.timeline.period(case.arrived_at, case.queued_at)
    done = front.activity
    return front.source == "plugin" and done.steps < _FEW_STEPS and 2 * done.busy_s > front.seconds


def parser_holdback(case: MissedCase, left_s: float) -> Claim | None:
    """The response had begun, and held its first tokens back."""
    held_s, usual_s = hold_back_of(case.record), case.usual.hold_back_s
    if held_s is None or held_s - (usual_s or 0.0) < _SHORTEST_S:
        return None
    seen = "in the engine's front" if case.in_front else "by the proxy"
    text = (
        f"the first token came {seconds(held_s)} after the first byte of the response ({seen}), "
        f"usually {seconds(usual_s or 0.0)}"
    )
    return Claim(held_s - (usual_s or 0.0), (text,))


def front_stalled(case: MissedCase, left_s: float) -> Claim | None:
    """A step of the core held the request before the core had seen it."""
    return stalled(case, case.arrived_at, case.queued_at)


def network(case: MissedCase, left_s: float) -> Claim | None:
    """The engine had its first token, and the response's first byte came late."""
    proxied = case.record.proxied
    if proxied is None or proxied.first_byte_s is None or case.usual.outside_s is None:
        return None
    if case.in_front:
        return None
    engine_s = case.first_at - case.arrived_at
    late_s = proxied.first_byte_s - engine_s - case.usual.outside_s
    if late_s < max(_SHORTEST_S, left_s / 2):
        return None
    text = (
        f"the response's first byte reached the proxy {seconds(proxied.first_byte_s - engine_s)} "
        f"later than the engine's first token explains, usually {seconds(case.usual.outside_s)}"
    )
    return Claim(late_s, (text,))


def slow_client(case: MissedCase, left_s: float) -> Claim | None:
    """The engine had sent everything long before the client had read it."""
    if case.record.proxied is None or case.record.decode_s is None or case.in_front:
        return None
    text = (
        f"the engine generated for {seconds(case.record.decode_s)} ({_engine_source(case)}), and "
        f"the client took {seconds(left_s)} longer to read the stream (by the proxy)"
    )
    return Claim(left_s, (text,)) if left_s >= _SHORTEST_S else None


def _engine_source(case: MissedCase) -> str:
    return "by its span" if case.has_span else "by the engine's own figures"


def admission(case: MissedCase, left_s: float) -> Claim | None:
    """The engine refused requests because its queue was full."""
    record = case.record
    refused = case.timeline.sampled.rejected(record.started_at, record.ended_at)
    if record.status is Status.THROTTLED:
        return Claim(0.0, (f"the request was refused with HTTP status {record.http_status}",))
    if record.http_status != _UNAVAILABLE or refused <= 0:
        return None
    return Claim(0.0, (f"the engine refused {refused:.0f} requests then (by its samples)",))


def engine_failure(case: MissedCase, left_s: float) -> Claim | None:
    """The engine died, hung, or answered with an error of its own."""
    record = case.record
    for at, event in case.timeline.died_at:
        if record.started_at - _SEEN_WITHIN_S <= at <= record.ended_at + _SEEN_WITHIN_S:
            return Claim(0.0, (f"event {event} of the engine at {at:.0f} (Unix time)",))
    if record.status is not Status.ERROR:
        return None
    status = record.http_status
    if status is not None and status >= _SERVER_ERROR:
        return Claim(0.0, (f"the engine answered with HTTP status {status}",))
    error = record.proxied and record.proxied.error
    if error is None or error == ProxyFailure.WORKER_DIED:
        return None
    return Claim(0.0, (f"the response ended with the error {error}",))


_Rule = Callable[[MissedCase, float], Claim | None]


class ClaimKind(Enum):
    """How a rule claims.

    CHANGE: something came that usually is not there. All of a phase claim what their removal would
    save, and share if that is more than the delay. REST: claims of what these left. STANDING:
    claims of what then is left, and is charged only as far as the others do not explain the excess:
    it also delays requests that keep their limits.
    """

    CHANGE = 0
    REST = 1
    STANDING = 2


class Rule(NamedTuple):
    """A cause, and the function that claims seconds for it.

    The function gets the case and the seconds of delay that are left, and returns None if it
    explains none of them. A rule with a sign is not called for a case without this sign.
    """

    cause: Cause
    claim: _Rule
    kind: ClaimKind = ClaimKind.REST
    sign: Sign | None = None


def _change(cause: Cause, claim: _Rule, sign: Sign | None = None) -> Rule:
    return Rule(cause, claim, ClaimKind.CHANGE, sign)


def _standing(cause: Cause, claim: _Rule) -> Rule:
    return Rule(cause, claim, ClaimKind.STANDING)


_QUEUE = (
    _change(Cause.DEFERRED, queue_rules.deferred),
    _change(Cause.BURST, queue_rules.burst),
    _change(Cause.KV_PRESSURE, queue_rules.kv_pressure_in_burst),
    _change(Cause.SEQUENCE_CAP, queue_rules.sequence_cap_in_burst),
    _change(Cause.CPU_STARVED, queue_rules.cpu_starved, Sign.CPU_WAITS),
    _change(Cause.GPU_THROTTLED, queue_rules.gpu_throttled, Sign.GPU_THROTTLED),
    _change(Cause.COLD_START, queue_rules.cold_start, Sign.STARTED),
    _change(Cause.CACHE_MISS, queue_rules.cache_miss),
    _change(Cause.PREFILL_BACKLOG, queue_rules.long_prompts_came),
    _change(Cause.STALL, queue_rules.stall, Sign.STALLED),
    Rule(Cause.PREFILL_BACKLOG, queue_rules.long_step_under_way),
    Rule(Cause.UNEXPLAINED, queue_rules.slow_steps),
    Rule(Cause.KV_PRESSURE, queue_rules.kv_pressure),
    Rule(Cause.SEQUENCE_CAP, queue_rules.sequence_cap),
    Rule(Cause.PREFILL_BACKLOG, queue_rules.prefill_backlog),
    _standing(Cause.PREFILL_BACKLOG, queue_rules.step_under_way),
)

_RULES: Mapping[Phase, tuple[Rule, ...]] = {
    Phase.OUTSIDE: (
        Rule(Cause.PARSER_HOLDBACK, parser_holdback),
        Rule(Cause.BURST, queue_rules.burst),
        Rule(Cause.CPU_STARVED, front_waited, sign=Sign.CPU_WAITS),
        Rule(Cause.NETWORK, network),
    ),
    Phase.STREAM: (
        Rule(Cause.CPU_STARVED, front_waited_in_stream, sign=Sign.CPU_WAITS),
        Rule(Cause.SLOW_CLIENT, slow_client),
    ),
    Phase.FRONT: (
        Rule(Cause.BURST, queue_rules.burst),
        Rule(Cause.CPU_STARVED, front_waited, sign=Sign.CPU_WAITS),
        Rule(Cause.COLD_START, request_cold, sign=Sign.STARTED),
        Rule(Cause.STALL, front_stalled, sign=Sign.STALLED),
        Rule(Cause.TOKENISING, tokenising),
    ),
    Phase.QUEUE: _QUEUE,
    Phase.PREFILL: (
        _change(Cause.CACHE_MISS, step_rules.cache_miss),
        _change(Cause.CACHE_MISS, step_rules.prefill_missed_by_others),
        _change(Cause.PREFILL_CONTENTION, step_rules.more_contention),
        _change(
            Cause.GPU_THROTTLED, lambda case, _: gpu_slowed(case, case.prefill), Sign.GPU_THROTTLED
        ),
        _change(
            Cause.CPU_STARVED,
            lambda case, _: core_waited(case, case.prefill, case.prefill_work),
            Sign.CPU_WAITS,
        ),
        _change(Cause.STALL, step_rules.prefill_stalled, Sign.STALLED),
        _change(Cause.BATCH_LOAD, step_rules.prefill_more_load),
        Rule(Cause.COLD_START, request_cold, sign=Sign.STARTED),
        Rule(Cause.UNEXPLAINED, step_rules.prefill_slow),
        _standing(Cause.PREFILL_CONTENTION, step_rules.contention),
        _standing(Cause.BATCH_LOAD, step_rules.prefill_batch_load),
    ),
    Phase.DECODE: (
        _change(Cause.PREEMPTION, step_rules.preemption),
        _change(Cause.PREEMPTION, step_rules.recomputation),
        _change(Cause.CACHE_MISS, step_rules.decode_missed_by_others),
        _change(Cause.PREFILL_INTERFERENCE, step_rules.more_interference),
        _change(
            Cause.GPU_THROTTLED, lambda case, _: gpu_slowed(case, case.decode), Sign.GPU_THROTTLED
        ),
        _change(
            Cause.CPU_STARVED,
            lambda case, _: core_waited(case, case.decode, case.decode_work),
            Sign.CPU_WAITS,
        ),
        _change(Cause.STALL, step_rules.decode_stalled, Sign.STALLED),
        _change(Cause.SPECULATION, step_rules.speculation, Sign.DRAFTS),
        _change(Cause.BATCH_LOAD, step_rules.decode_more_load),
        Rule(Cause.COLD_START, request_cold, sign=Sign.STARTED),
        Rule(Cause.UNEXPLAINED, step_rules.decode_slow),
        _standing(Cause.PREFILL_INTERFERENCE, step_rules.interference),
        _standing(Cause.BATCH_LOAD, step_rules.decode_batch_load),
    ),
    Phase.UNSPLIT: _QUEUE,
}


class PhaseRules(NamedTuple):
    """The rules of a phase that apply: changes, and the others in their order."""

    changes: tuple[Rule, ...]
    others: tuple[Rule, ...]


@cache
def rules_of(phase: Phase, signs: frozenset[Sign]) -> PhaseRules:
    """The rules of a phase that apply with these signs."""
    rules = [rule for rule in _RULES[phase] if rule.sign is None or rule.sign in signs]
    return PhaseRules(
        tuple(rule for rule in rules if rule.kind is ClaimKind.CHANGE),
        tuple(rule for rule in rules if rule.kind is not ClaimKind.CHANGE),
    )


FAILURES: tuple[Rule, ...] = (
    Rule(Cause.ADMISSION, admission),
    Rule(Cause.ENGINE_FAILURE, engine_failure),
)


# A delay below this share of the excess is noise of clocks.
_NOISE_SHARE = 0.01
# Smaller claims are rounding errors.
_LEAST_S = 1e-6
# A prompt or a response is long if it needs at least this share of all needed time.
_LONG_SHARE = 0.5

_SOURCES = ("plugin", "span", "proxy", "samples")

# The seconds charged to a cause, and the evidence.
_Charge = tuple[float, tuple[str, ...]]


class _Share(msgspec.Struct, frozen=True):
    cause: Cause
    seconds: float
    evidence: tuple[str, ...]


class _PhaseClaims(msgspec.Struct, frozen=True):
    """The delay of a phase: by what is new or unknown, and by what always stands."""

    first: list[_Share]
    standing: list[_Share]


_Charged = dict[PhaseTime, _PhaseClaims]


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
    worst_s = 0.0
    for objective in objectives:
        own: list[CauseShare] = []
        own_s = 0.0
        for excess in excesses(record, objective):
            own += _shares(case, excess, known)
            own_s += excess.seconds or 0.0
        shares += own
        if not worst or own_s > worst_s:
            worst, worst_s = own, own_s
    return Explanation(
        trace_id=record.trace_id,
        span_id=record.span_id,
        top=_top(worst),
        shares=tuple(shares),
        sources=_sources(case),
    )


def _top(shares: Sequence[CauseShare]) -> Cause:
    totals: dict[Cause, float] = {}
    for share in shares:
        totals[share.cause] = totals.get(share.cause, 0.0) + (share.excess_s or 0.0)
    return max(totals, key=totals.__getitem__, default=Cause.UNEXPLAINED)


def _sources(case: MissedCase) -> tuple[str, ...]:
    there = (
        case.ended is not None or _has_steps(case),
        case.has_span,
        case.record.proxied is not None and not case.in_front,
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
    first: list[_Share] = []
    standing: list[_Share] = []
    for phase in phases:
        if phase.seconds - phase.needed_s <= noise_s:
            continue
        # Several limits have this phase, and its claims are the same for all.
        claims = known.get(phase)
        if claims is None:
            claims = known[phase] = _charged(case, phase)
        first += claims.first
        standing += claims.standing
    charges: dict[Cause, _Charge] = {}
    over_s = excess_s - _charge_all(charges, first, excess_s)
    over_s -= _charge_all(charges, standing, over_s)
    if over_s > len(phases) * noise_s or not charges:
        cause, text = _needed(case, excess, phases)
        _charge(charges, cause, over_s, (text,))
        over_s = 0.0
    scale = excess_s / (excess_s - over_s)
    objective, limit = excess.objective, excess.limit
    return [
        CauseShare(objective, limit, cause, charged_s * scale, evidence)
        for cause, (charged_s, evidence) in charges.items()
    ]


def _charge_all(charges: dict[Cause, _Charge], claims: Sequence[_Share], most_s: float) -> float:
    """Add claims, scaled down to `most_s` in all; the charged seconds."""
    if not claims or most_s <= 0:
        return 0.0
    claimed_s = sum([claim.seconds for claim in claims])
    scale = most_s / claimed_s if claimed_s > most_s else 1.0
    for claim in claims:
        _charge(charges, claim.cause, claim.seconds * scale, claim.evidence)
    return claimed_s * scale


def _charged(case: MissedCase, phase: PhaseTime) -> _PhaseClaims:
    """The delay of one phase by cause."""
    delay_s = phase.seconds - phase.needed_s
    rules = rules_of(phase.phase, case.signs)
    first = _changes(case, rules.changes, delay_s)
    left_s = delay_s
    if first:
        left_s -= sum([claim.seconds for claim in first])
    noise_s = _NOISE_SHARE * delay_s
    standing: list[_Share] = []
    for rule in rules.others:
        if left_s <= noise_s:
            return _limited(case, phase, _PhaseClaims(first, standing))
        claim = rule.claim(case, left_s)
        if claim is None or claim.seconds < _LEAST_S:
            continue
        claimed_s = claim.seconds if claim.seconds < left_s else left_s
        left_s -= claimed_s
        of_kind = standing if rule.kind is ClaimKind.STANDING else first
        of_kind.append(_Share(claim.cause or rule.cause, claimed_s, claim.evidence))
    if left_s > noise_s:
        unexplained = _Share(Cause.UNEXPLAINED, left_s, _missing_evidence(case, phase))
        # What steps usually take is known, so the rest stands as well.
        (standing if _is_known(case, phase) else first).append(unexplained)
    return _limited(case, phase, _PhaseClaims(first, standing))


def _limited(case: MissedCase, phase: PhaseTime, claims: _PhaseClaims) -> _PhaseClaims:
    """The claims, with no more of what always stands than it can delay; the rest is unexplained."""
    if not claims.standing or phase.phase is not Phase.DECODE:
        return claims
    standing_s = sum([claim.seconds for claim in claims.standing])
    most_s = case.most_standing_s(phase)
    if standing_s <= most_s:
        return claims
    text = (
        f"prompts and batches as usual delay such a request by no more than {seconds(most_s)} of "
        f"the {seconds(phase.seconds)} {_place(case, phase)}"
    )
    over = _Share(Cause.UNEXPLAINED, standing_s - most_s, (text,))
    scale = most_s / standing_s
    return _PhaseClaims([*claims.first, over], _scaled(claims.standing, scale))


def _changes(case: MissedCase, rules: Sequence[Rule], delay_s: float) -> list[_Share]:
    """What each change would save alone, scaled down if that is more than the delay."""
    claims: list[_Share] = []
    for rule in rules:
        claim = rule.claim(case, delay_s)
        if claim is not None and claim.seconds >= _LEAST_S:
            claims.append(
                _Share(claim.cause or rule.cause, min(delay_s, claim.seconds), claim.evidence)
            )
    if not claims:
        return claims
    claimed_s = sum([claim.seconds for claim in claims])
    return claims if claimed_s <= delay_s else _scaled(claims, delay_s / claimed_s)


def _scaled(claims: Sequence[_Share], scale: float) -> list[_Share]:
    return [_Share(each.cause, scale * each.seconds, each.evidence) for each in claims]


def _is_known(case: MissedCase, phase: PhaseTime) -> bool:
    if phase.phase is Phase.PREFILL:
        return case.prefill_work is not None
    return phase.phase is Phase.DECODE and case.decode_work is not None


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
    return (f"{seconds(delay_s)} of delay {_place(case, phase)}; it would help to know {missing}",)


def _place(case: MissedCase, phase: PhaseTime) -> str:
    if case.in_front and phase.phase in (Phase.OUTSIDE, Phase.STREAM):
        return "in the engine's front, beside its core"
    return f"in {phase.phase}"


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
