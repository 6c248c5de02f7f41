"""What an engine did between two samples of it: gauges as read, counters as increases."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from agent.catalog import engine_facts as fact
from agent.records.gpu import Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMoment:
    """A sample of an engine. Steps, tokens and preemptions are since the sample before.

    Unknown is None, also after a restart, when counters fall.
    """

    at: float
    running: float | None
    waiting: float | None
    kv_cache_usage: float | None
    steps_per_s: float | None
    tokens_per_step: float | None
    preemptions: float | None


def engine_moments(samples: Sequence[tuple[float, Facts]]) -> list[EngineMoment]:
    """A moment for each sample but the first, which only counters begin with."""
    return [_moment(before, sample) for before, sample in pairwise(samples)]


def _moment(before: tuple[float, Facts], sample: tuple[float, Facts]) -> EngineMoment:
    (since, earlier), (at, facts) = before, sample
    steps = _increase(earlier, facts, fact.STEPS.name)
    tokens = _increase(earlier, facts, fact.STEP_TOKENS.name)
    return EngineMoment(
        at=at,
        running=facts.get((fact.REQUESTS_RUNNING.name, ())),
        waiting=facts.get((fact.REQUESTS_WAITING.name, ())),
        kv_cache_usage=facts.get((fact.KV_CACHE_USAGE.name, ())),
        steps_per_s=None if steps is None or at <= since else steps / (at - since),
        tokens_per_step=None if not steps or tokens is None else tokens / steps,
        preemptions=_increase(earlier, facts, fact.PREEMPTIONS.name),
    )


def _increase(earlier: Facts, later: Facts, name: str) -> float | None:
    first, last = earlier.get((name, ())), later.get((name, ()))
    if first is None or last is None or last < first:
        return None
    return last - first
