"""Whether an engine restarted between two samples."""

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

# Two starts are further apart. The reported start time of one process wavers by less.
_SAME_START_S = 1.0


def restart_between(before: EngineSample, after: EngineSample) -> Confidence | None:
    """The confidence that the engine restarted between these samples; None without evidence.

    Another start time of its process makes it certain. A counter reset, or counters that are
    gone, make it probable, or suspected if the start time is the same.
    """
    same_start = _same_start(before.process_started_at, after.process_started_at)
    if same_start is False:
        return Confidence.CERTAIN
    if not _counters_fell(before, after):
        return None
    if _ranks_left(before, after) and not _ranks_fell(before, after):
        return None
    return Confidence.SUSPECTED if same_start else Confidence.PROBABLE


def key_figures(sample: EngineSample) -> dict[str, str | float | None]:
    """The key figures of a sample, as evidence of an event."""
    return {
        "last_sample_at": sample.at,
        "process_started_at": sample.process_started_at,
        **{name: sample.fact(metric.name) for name, metric in _KEY_FIGURES.items()},
    }


def _same_start(before: float | None, after: float | None) -> bool | None:
    return None if before is None or after is None else abs(after - before) < _SAME_START_S


def _ranks_left(before: EngineSample, after: EngineSample) -> bool:
    """Whether the engine has fewer data-parallel ranks: those that left took their counts."""
    ranks = after.fact(DATA_PARALLEL_RANKS.name)
    return ranks is not None and ranks < (before.fact(DATA_PARALLEL_RANKS.name) or 0)


def _ranks_fell(before: EngineSample, after: EngineSample) -> bool:
    """Whether counters of a rank that stayed were reset.

    A single rank is reported without its name: it may be any of the ranks before.
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
    # Some engines report a counter only once it has counted: a restart removes all of them.
    return bool(then) and (not now or any(now[key] < then[key] for key in now))
