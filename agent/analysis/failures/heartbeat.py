"""What samples of an engine show of its work: whether it computes, sleeps or takes requests."""

from agent.catalog.engine_facts import (
    AWAKE,
    KV_CACHE_USAGE,
    OUTPUT_TOKENS,
    PREEMPTIONS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    STEP_TOKENS,
    STEPS,
)
from agent.records.engine import EngineSample

Beat = tuple[float | None, ...]

_BEATS = (STEPS, STEP_TOKENS, OUTPUT_TOKENS, PREEMPTIONS, KV_CACHE_USAGE)
# The facts that hang detection needs of each data-parallel rank.
HEARTBEAT_FACTS = frozenset({*_BEATS, AWAKE, REQUESTS_RUNNING})


def beat_of(sample: EngineSample) -> Beat | None:
    """Facts that change whenever the engine computes; None if it does not count its steps.

    Tokens alone are not enough: many engines count them when a request ends. A long prefill
    outputs no token for many steps, but each step fills the KV cache.
    """
    if sample.fact(STEPS.name) is None:
        return None
    return tuple(sample.fact(fact.name) for fact in _BEATS)


def has_work(sample: EngineSample) -> bool:
    """Whether the engine is awake and has requests in its batch."""
    return not sleeps(sample) and (sample.fact(REQUESTS_RUNNING.name) or 0) > 0


def sleeps(sample: EngineSample) -> bool:
    """Whether the engine reports that it sleeps."""
    return sample.fact(AWAKE.name) == 0


def takes_work(before: EngineSample | None, after: EngineSample) -> bool:
    """Whether new requests came between two samples: more requests are in the engine.

    An engine that only finishes its requests never has more: a preempted one waits again.
    """
    in_engine = (REQUESTS_RUNNING.name, REQUESTS_WAITING.name)
    return before is not None and (
        sum((after.fact(name) or 0) - (before.fact(name) or 0) for name in in_engine) > 0
    )


def stepped(before: EngineSample | None, after: EngineSample | None) -> bool:
    """Whether the engine made steps between two samples."""
    if before is None or after is None:
        return False
    now, then = after.fact(STEPS.name), before.fact(STEPS.name)
    return now is not None and then is not None and now > then


def moves(before: EngineSample | None, after: EngineSample) -> bool:
    """Whether the engine computed between two samples.

    An engine that does not count its steps computed if any fact changed.
    """
    if before is None:
        return False
    return computes(before, after) if beat_of(after) else before.facts != after.facts


def computes(before: EngineSample | None, after: EngineSample) -> bool:
    """Whether an engine that counts its steps computed between two samples."""
    beat = beat_of(after)
    return before is not None and beat is not None and beat != beat_of(before)
