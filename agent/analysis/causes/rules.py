"""The rules of every phase, in the order in which they claim its delay. A new rule needs a line."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

from agent.analysis.causes import (
    decode_rules,
    failure_rules,
    front_rules,
    prefill_rules,
    queue_rules,
)
from agent.analysis.causes.missed_case import Claim, MissedCase, Phase, Sign
from agent.catalog.causes import Cause

_Rule = Callable[[MissedCase, float], Claim | None]


class Rule(NamedTuple):
    """A cause, and the function that claims seconds for it.

    The function gets the case and the seconds of delay that are left, and returns None where it
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
        Rule(Cause.PARSER_HOLDBACK, front_rules.parser_holdback),
        Rule(Cause.BURST, queue_rules.burst),
        Rule(Cause.CPU_STARVED, front_rules.cpu_starved, Sign.CPU_WAITS),
        Rule(Cause.NETWORK, front_rules.network),
    ),
    Phase.STREAM: (Rule(Cause.SLOW_CLIENT, front_rules.slow_client),),
    Phase.FRONT: (
        Rule(Cause.BURST, queue_rules.burst),
        Rule(Cause.CPU_STARVED, front_rules.cpu_starved, Sign.CPU_WAITS),
        Rule(Cause.COLD_START, front_rules.cold_start, Sign.STARTED),
        Rule(Cause.TOKENISING, front_rules.tokenising),
    ),
    Phase.QUEUE: _QUEUE,
    Phase.PREFILL: (
        Rule(Cause.CACHE_MISS, prefill_rules.cache_miss),
        Rule(Cause.CACHE_MISS, prefill_rules.cache_missed_by_others),
        Rule(Cause.PREFILL_CONTENTION, prefill_rules.contention),
        Rule(Cause.GPU_THROTTLED, prefill_rules.gpu_throttled, Sign.GPU_THROTTLED),
        Rule(Cause.CPU_STARVED, prefill_rules.cpu_starved, Sign.CPU_WAITS),
        Rule(Cause.BATCH_LOAD, prefill_rules.batch_load),
        Rule(Cause.COLD_START, prefill_rules.cold_start, Sign.STARTED),
    ),
    Phase.DECODE: (
        Rule(Cause.PREEMPTION, decode_rules.preemption),
        Rule(Cause.PREEMPTION, decode_rules.recomputation),
        Rule(Cause.CACHE_MISS, decode_rules.cache_missed_by_others),
        Rule(Cause.PREFILL_INTERFERENCE, decode_rules.interference),
        Rule(Cause.GPU_THROTTLED, decode_rules.gpu_throttled, Sign.GPU_THROTTLED),
        Rule(Cause.CPU_STARVED, decode_rules.cpu_starved, Sign.CPU_WAITS),
        Rule(Cause.SPECULATION, decode_rules.speculation, Sign.DRAFTS),
        Rule(Cause.BATCH_LOAD, decode_rules.batch_load),
        Rule(Cause.COLD_START, decode_rules.cold_start, Sign.STARTED),
    ),
    Phase.UNSPLIT: _QUEUE,
}


@cache
def rules_of(phase: Phase, signs: frozenset[Sign]) -> tuple[tuple[Cause, _Rule], ...]:
    """The cause and function of each rule of a phase that applies with these signs."""
    rules = [rule for rule in _RULES[phase] if rule.sign is None or rule.sign in signs]
    return tuple((rule.cause, rule.claim) for rule in rules)


FAILURES: tuple[Rule, ...] = (
    Rule(Cause.ADMISSION, failure_rules.admission),
    Rule(Cause.ENGINE_FAILURE, failure_rules.engine_failure),
)
