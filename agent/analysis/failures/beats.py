"""The heartbeat of an engine, as its page shows it."""

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
# All that is asked of a sample here.
HEARTBEAT_FACTS = frozenset({*_BEATS, AWAKE, REQUESTS_RUNNING})


def beat_of(sample: EngineSample) -> Beat | None:
    """What changes whenever the engine computes; None where the page does not count its steps.

    Tokens alone do not tell: many engines count them when a request ends. A long prefill gives no
    output for many steps, but fills the KV cache with each.
    """
    if sample.fact(STEPS.name) is None:
        return None
    return tuple(sample.fact(fact.name) for fact in _BEATS)


def has_work(sample: EngineSample) -> bool:
    """Whether the engine is awake and has requests in its batch."""
    return not sleeps(sample) and (sample.fact(REQUESTS_RUNNING.name) or 0) > 0


def sleeps(sample: EngineSample) -> bool:
    """Whether the engine said that it sleeps."""
    return sample.fact(AWAKE.name) == 0


def takes_work(before: EngineSample | None, after: EngineSample) -> bool:
    """Whether requests came between two samples, as more of them are in the engine.

    What merely finishes its requests never has more: one that is thrown back waits again.
    """
    return before is not None and _in_engine(after) > _in_engine(before)


def _in_engine(sample: EngineSample) -> float:
    counts = (sample.fact(fact.name) for fact in (REQUESTS_RUNNING, REQUESTS_WAITING))
    return sum(count or 0.0 for count in counts)


def stepped(before: EngineSample | None, after: EngineSample | None) -> bool:
    """Whether the engine made steps between two samples."""
    if before is None or after is None:
        return False
    made, made_then = after.fact(STEPS.name), before.fact(STEPS.name)
    return made is not None and made_then is not None and made > made_then


def moves(before: EngineSample | None, after: EngineSample) -> bool:
    """Whether the engine computed between two samples.

    Where its steps are not counted, whether any figure of its page moved.
    """
    if before is None:
        return False
    return computes(before, after) if beat_of(after) else before.facts != after.facts


def computes(before: EngineSample | None, after: EngineSample) -> bool:
    """Whether the engine was seen to compute between two samples."""
    beat = beat_of(after)
    return before is not None and beat is not None and beat != beat_of(before)
