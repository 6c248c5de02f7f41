"""Charges the excess seconds of a missed request to causes, by the rules of each phase.

Rules claim a phase's delay in their order; a new rule needs a line. Rules of the queue and of steps
are in their own modules. Here are those of the time outside the engine's core, and those of failed
requests.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import compress
from typing import NamedTuple

from agent.analysis.causes import queue_rules, step_rules
from agent.analysis.causes.baselines import hold_back_of
from agent.analysis.causes.engine_rules import (
    core_waited,
    front_waited,
    front_waited_in_stream,
    gpu_slowed,
    request_cold,
    seconds,
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
    front_s = case.queued_at - case.arrived_at
    text = (
        f"the engine's front took {seconds(front_s)} ({_engine_source(case)}), usually "
        f"{seconds(usual_s)} "
        "for prompts of this length"
    )
    return Claim(left_s, (text,))


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


class Rule(NamedTuple):
    """A cause, and the function that claims seconds for it.

    The function gets the case and the seconds of delay that are left, and returns None if it
    explains none of them. A rule with a sign is not called for a case without this sign.
    """

    cause: Cause
    claim: _Rule
    sign: Sign | None = None


_QUEUE = (
    Rule(Cause.DEFERRED, queue_rules.deferred),
    Rule(Cause.BURST, queue_rules.burst),
    Rule(Cause.CPU_STARVED, queue_rules.cpu_starved, Sign.CPU_WAITS),
    Rule(Cause.GPU_THROTTLED, queue_rules.gpu_throttled, Sign.GPU_THROTTLED),
    Rule(Cause.COLD_START, queue_rules.cold_start, Sign.STARTED),
    Rule(Cause.CACHE_MISS, queue_rules.cache_miss),
    Rule(Cause.PREFILL_BACKLOG, queue_rules.long_prompts_came),
    Rule(Cause.UNEXPLAINED, queue_rules.slow_steps),
    Rule(Cause.KV_PRESSURE, queue_rules.kv_pressure),
    Rule(Cause.SEQUENCE_CAP, queue_rules.sequence_cap),
    Rule(Cause.PREFILL_BACKLOG, queue_rules.prefill_backlog),
    Rule(Cause.PREFILL_BACKLOG, queue_rules.step_under_way),
)

_RULES: Mapping[Phase, tuple[Rule, ...]] = {
    Phase.OUTSIDE: (
        Rule(Cause.PARSER_HOLDBACK, parser_holdback),
        Rule(Cause.BURST, queue_rules.burst),
        Rule(Cause.CPU_STARVED, front_waited, Sign.CPU_WAITS),
        Rule(Cause.NETWORK, network),
    ),
    Phase.STREAM: (
        Rule(Cause.CPU_STARVED, front_waited_in_stream, Sign.CPU_WAITS),
        Rule(Cause.SLOW_CLIENT, slow_client),
    ),
    Phase.FRONT: (
        Rule(Cause.BURST, queue_rules.burst),
        Rule(Cause.CPU_STARVED, front_waited, Sign.CPU_WAITS),
        Rule(Cause.COLD_START, request_cold, Sign.STARTED),
        Rule(Cause.TOKENISING, tokenising),
    ),
    Phase.QUEUE: _QUEUE,
    Phase.PREFILL: (
        Rule(Cause.CACHE_MISS, step_rules.cache_miss),
        Rule(Cause.CACHE_MISS, step_rules.prefill_missed_by_others),
        Rule(Cause.PREFILL_CONTENTION, step_rules.contention),
        Rule(
            Cause.GPU_THROTTLED, lambda case, _: gpu_slowed(case, case.prefill), Sign.GPU_THROTTLED
        ),
        Rule(Cause.CPU_STARVED, lambda case, _: core_waited(case, case.prefill), Sign.CPU_WAITS),
        Rule(Cause.BATCH_LOAD, step_rules.prefill_batch_load),
        Rule(Cause.COLD_START, request_cold, Sign.STARTED),
    ),
    Phase.DECODE: (
        Rule(Cause.PREEMPTION, step_rules.preemption),
        Rule(Cause.PREEMPTION, step_rules.recomputation),
        Rule(Cause.CACHE_MISS, step_rules.decode_missed_by_others),
        Rule(Cause.PREFILL_INTERFERENCE, step_rules.interference),
        Rule(
            Cause.GPU_THROTTLED, lambda case, _: gpu_slowed(case, case.decode), Sign.GPU_THROTTLED
        ),
        Rule(Cause.CPU_STARVED, lambda case, _: core_waited(case, case.decode), Sign.CPU_WAITS),
        Rule(Cause.SPECULATION, step_rules.speculation, Sign.DRAFTS),
        Rule(Cause.BATCH_LOAD, step_rules.decode_batch_load),
        Rule(Cause.COLD_START, request_cold, Sign.STARTED),
    ),
    Phase.UNSPLIT: _QUEUE,
}


@cache
def rules_of(phase: Phase, signs: frozenset[Sign]) -> tuple[tuple[Cause, _Rule], ...]:
    """The cause and function of each rule of a phase that applies with these signs."""
    rules = [rule for rule in _RULES[phase] if rule.sign is None or rule.sign in signs]
    return tuple((rule.cause, rule.claim) for rule in rules)


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
        if claim is None or claim.seconds < _LEAST_S:
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
