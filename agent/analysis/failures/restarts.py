"""Whether an engine started anew between two samples."""

from agent.catalog.engine_facts import (
    DATA_PARALLEL_RANKS,
    ENGINE_FACTS,
    KV_CACHE_USAGE,
    OUTPUT_TOKENS,
    PREEMPTIONS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
)
from agent.catalog.metric import Kind
from agent.records.engine import EngineSample
from agent.records.event import Confidence

_COUNTERS = frozenset(metric.name for metric in ENGINE_FACTS if metric.kind is Kind.COUNTER)
_KEY_FIGURES = {
    "requests_running": REQUESTS_RUNNING,
    "requests_waiting": REQUESTS_WAITING,
    "kv_cache_usage": KV_CACHE_USAGE,
    "preemptions": PREEMPTIONS,
    "output_tokens": OUTPUT_TOKENS,
}

# Two starts of one process lie further apart; a clock that was set meanwhile does not.
_SAME_START_S = 1.0


def restart_between(before: EngineSample, after: EngineSample) -> Confidence | None:
    """How sure it is that the engine restarted between these samples; None when nothing says so.

    Certain when its process has another start time. Counters that fell or vanished make it
    probable, or merely suspected when the start time shows the process that was there before.
    """
    same_start = _same_start(before, after)
    if same_start is False:
        return Confidence.CERTAIN
    if not _counters_fell(before, after):
        return None
    if _ranks_left(before, after) and not _ranks_fell(before, after):
        return None
    return Confidence.SUSPECTED if same_start else Confidence.PROBABLE


def figures(sample: EngineSample) -> dict[str, str | float | None]:
    """The key figures of a sample, for the evidence of an event."""
    told = {name: sample.fact(metric.name) for name, metric in _KEY_FIGURES.items()}
    return {
        "last_sample_at": sample.at,
        "process_started_at": sample.process_started_at,
        **told,
    }


def _same_start(before: EngineSample, after: EngineSample) -> bool | None:
    if before.process_started_at is None or after.process_started_at is None:
        return None
    return abs(after.process_started_at - before.process_started_at) < _SAME_START_S


def _ranks_left(before: EngineSample, after: EngineSample) -> bool:
    """Whether fewer data-parallel ranks are on the page: they took their counts along."""
    ranks = after.fact(DATA_PARALLEL_RANKS.name)
    return ranks is not None and ranks < (before.fact(DATA_PARALLEL_RANKS.name) or 0)


def _ranks_fell(before: EngineSample, after: EngineSample) -> bool:
    """Whether counters of a rank that stayed fell.

    A rank that is alone on its page is not told of by name: it may be any that was there before.
    """
    if not after.ranks:
        ranks = before.ranks.values()
        return bool(ranks) and all(_counters_fell(rank, after) for rank in ranks)
    return any(
        _counters_fell(before.ranks[rank], sample)
        for rank, sample in after.ranks.items()
        if rank in before.ranks
    )


def _counters_fell(before: EngineSample, after: EngineSample) -> bool:
    then = {key: value for key, value in before.facts.items() if key[0] in _COUNTERS and value > 0}
    now = {key: after.facts[key] for key in then if key in after.facts}
    # Some engines tell a counter only once it has counted: after a restart all of them are gone.
    return bool(then) and (not now or any(now[key] < then[key] for key in now))
