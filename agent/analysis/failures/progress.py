"""What samples of an engine show: whether it computes, sleeps, takes requests or restarted."""

from agent.catalog.engine_facts import (
    AWAKE,
    DATA_PARALLEL_RANKS,
    ENGINE_FACTS,
    KV_CACHE_USAGE,
    OUTPUT_TOKENS,
    PREEMPTIONS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    REQUESTS_WAITING_BY_REASON,
    SCRAPE_DURATION,
    STEP_TOKENS,
    STEPS,
)
from agent.catalog.metric import Kind
from agent.records.engine import EngineSample
from agent.records.event import Confidence
from agent.records.gpu import Facts

Progress = tuple[float | None, ...]

_PROGRESS = (STEPS, STEP_TOKENS, OUTPUT_TOKENS, PREEMPTIONS, KV_CACHE_USAGE)
# The facts that hang detection needs of each data-parallel rank.
_LOAD = (REQUESTS_RUNNING, REQUESTS_WAITING, REQUESTS_WAITING_BY_REASON)
PROGRESS_FACTS = frozenset({*_PROGRESS, AWAKE, *_LOAD})
_QUEUE = frozenset({REQUESTS_WAITING.name, REQUESTS_WAITING_BY_REASON.name})
# vLLM's word for requests that wait for something else than a place, such as KV from elsewhere.
_DEFERRED = "deferred"


def progress_of(sample: EngineSample) -> Progress | None:
    """Facts that change whenever the engine computes; None where it may compute without a change.

    Tokens alone are not enough: many engines count them when a request ends. A long prefill
    outputs no token for many steps, but each step fills the KV cache. An engine that does not count
    its steps must change something where requests only wait: none of them may be in a long step.
    """
    if sample.fact(STEPS.name) is not None:
        return tuple(sample.fact(fact.name) for fact in _PROGRESS)
    if not _only_wait(sample):
        return None
    # More requests that wait are no progress.
    others = {key: value for key, value in reported(sample).items() if key[0] not in _QUEUE}
    return tuple(others[key] for key in sorted(others))


def reported(sample: EngineSample) -> Facts:
    """The facts that the engine reported, without those that the agent measured."""
    return {key: value for key, value in sample.facts.items() if key[0] != SCRAPE_DURATION.name}


def has_work(sample: EngineSample) -> bool:
    """Whether the engine is awake and has requests in its batch, or requests that only wait."""
    running = (sample.fact(REQUESTS_RUNNING.name) or 0) > 0
    return not sleeps(sample) and (running or _only_wait(sample))


def _only_wait(sample: EngineSample) -> bool:
    """Whether requests wait for a place and none runs."""
    deferred = sample.fact(REQUESTS_WAITING_BY_REASON.name, _DEFERRED) or 0
    waiting = (sample.fact(REQUESTS_WAITING.name) or 0) - deferred
    return waiting > 0 and sample.fact(REQUESTS_RUNNING.name) == 0


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
    return computes(before, after) if progress_of(after) else reported(before) != reported(after)


def computes(before: EngineSample | None, after: EngineSample) -> bool:
    """Whether an engine that counts its steps computed between two samples."""
    progress = progress_of(after)
    return before is not None and progress is not None and progress != progress_of(before)


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
