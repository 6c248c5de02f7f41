"""The rules of every phase, in the order in which they claim its delay. A new rule needs a line.

Rules of the queue and of steps are in their own modules. Here are those of the time outside the
engine's core, and those of failed requests.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

from agent.analysis.causes import queue_rules, step_rules
from agent.analysis.causes.baselines import hold_back_of
from agent.analysis.causes.engine_rules import (
    core_waited,
    front_waited,
    gpu_slowed,
    request_cold,
    seconds,
)
from agent.analysis.causes.missed_case import Claim, MissedCase, Phase, Sign
from agent.catalog.causes import Cause
from agent.catalog.reasons import ProxyFailure
from agent.records.request import Status

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
        f"the engine's front took {seconds(front_s)} (by the span), usually {seconds(usual_s)} "
        "for prompts of this length"
    )
    return Claim(left_s, (text,))


def parser_holdback(case: MissedCase, left_s: float) -> Claim | None:
    """The response had begun, and held its first tokens back."""
    held_s, usual_s = hold_back_of(case.record), case.usual.hold_back_s
    if held_s is None or held_s - (usual_s or 0.0) < _SHORTEST_S:
        return None
    text = (
        f"the first token came {seconds(held_s)} after the first byte of the response (by the "
        f"proxy), usually {seconds(usual_s or 0.0)}"
    )
    return Claim(held_s - (usual_s or 0.0), (text,))


def network(case: MissedCase, left_s: float) -> Claim | None:
    """The engine had its first token, and the response's first byte came late."""
    proxied = case.record.proxied
    if proxied is None or proxied.first_byte_s is None or case.usual.outside_s is None:
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
    if case.record.proxied is None or case.record.decode_s is None:
        return None
    text = (
        f"the engine generated for {seconds(case.record.decode_s)} (by its span), and the client "
        f"took {seconds(left_s)} longer to read the stream (by the proxy)"
    )
    return Claim(left_s, (text,)) if left_s >= _SHORTEST_S else None


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
    Phase.STREAM: (Rule(Cause.SLOW_CLIENT, slow_client),),
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
