"""How far an engine's counters grew between two samples."""

from collections.abc import Iterator
from typing import NamedTuple

from agent.catalog import engine_facts as fact
from agent.catalog.metric import Metric
from agent.records.engine import EngineSample

# vLLM's source label of prompt tokens that it computed; all other sources are caches.
_COMPUTED_HERE = "local_compute"
# vLLM's finish reason of requests that were aborted; only its frontend in Rust counts all of them.
# An engine without reasons may count aborted ones too.
_NOT_FINISHED = frozenset([("abort",), ("",)])


class Growth(NamedTuple):
    """What an engine counted in some time; None where it has no such counter.

    `cached_tokens` are the part of `input_tokens` that was not computed, `first_tokens` the part of
    `output_tokens` that prefill computed. FLOPs and bytes are the engine's own estimate per GPU,
    summed over data-parallel ranks. `finished` requests were not aborted, `refused` not admitted.
    """

    steps: float | None = None
    input_tokens: float | None = None
    cached_tokens: float | None = None
    output_tokens: float | None = None
    first_tokens: float | None = None
    flops: float | None = None
    read_bytes: float | None = None
    written_bytes: float | None = None
    preemptions: float | None = None
    draft_tokens: float | None = None
    accepted_draft_tokens: float | None = None
    finished: float | None = None
    refused: float | None = None
    drafts: float | None = None
    prefix_query_tokens: float | None = None
    prefix_hit_tokens: float | None = None
    step_tokens: float | None = None

    @property
    def computed_tokens(self) -> float | None:
        """Prompt tokens that were computed; all of them where the engine counts no cached ones."""
        if self.input_tokens is None:
            return None
        return max(self.input_tokens - (self.cached_tokens or 0.0), 0.0)

    @property
    def cached_share(self) -> float:
        """The share of prompt tokens that was not computed; 0 where it is unknown."""
        if not self.input_tokens or self.cached_tokens is None:
            return 0.0
        return min(self.cached_tokens / self.input_tokens, 1.0)

    @property
    def moved(self) -> bool:
        """Whether any counter shows that the engine worked."""
        return any((self.steps, self.input_tokens, self.output_tokens))

    def times(self, share: float) -> "Growth":
        """This share of every counter."""
        return Growth(*[None if value is None else value * share for value in self])

    def plus(self, other: "Growth") -> "Growth":
        """The sum; a counter that only one of them knows has that one's value."""
        return Growth(*[_added(mine, yours) for mine, yours in zip(self, other, strict=True)])


def growth_between(before: EngineSample, after: EngineSample, *, restarted: bool) -> Growth:
    """What the engine counted between two samples.

    After a restart or a counter reset the new values are all that is known to have been counted.
    """
    then = [0.0] * len(Growth._fields) if restarted else list(_counters(before))
    return Growth(
        *[counter_increase(old, new) for old, new in zip(then, _counters(after), strict=True)]
    )


def counter_increase(before: float | None, after: float | None) -> float | None:
    """How far a counter went up. After a reset the new value is all growth."""
    if before is None or after is None:
        return None
    return after - before if after >= before else max(after, 0.0)


def _added(mine: float | None, yours: float | None) -> float | None:
    if mine is None or yours is None:
        return yours if mine is None else mine
    return mine + yours


def _counters(sample: EngineSample) -> Iterator[float | None]:
    """The counters in the order of Growth."""
    yield _value(sample, fact.STEPS)
    yield _value(sample, fact.INPUT_TOKENS)
    yield _cached(sample)
    yield _value(sample, fact.OUTPUT_TOKENS)
    yield sample.fact(fact.FIRST_TOKENS)
    yield _value(sample, fact.ESTIMATED_GPU_FLOPS)
    yield _value(sample, fact.ESTIMATED_GPU_READ_BYTES)
    yield _value(sample, fact.ESTIMATED_GPU_WRITE_BYTES)
    yield _value(sample, fact.PREEMPTIONS)
    yield _value(sample, fact.SPEC_DECODE_DRAFT_TOKENS)
    yield _value(sample, fact.SPEC_DECODE_ACCEPTED_TOKENS)
    yield _by_label(sample, fact.REQUESTS_FINISHED, but=_NOT_FINISHED)
    yield _by_label(sample, fact.ADMISSION_REJECTIONS)
    yield _value(sample, fact.SPEC_DECODE_DRAFTS)
    yield _value(sample, fact.PREFIX_CACHE_QUERY_TOKENS)
    yield _value(sample, fact.PREFIX_CACHE_HIT_TOKENS)
    yield _value(sample, fact.STEP_TOKENS)


def _value(sample: EngineSample, metric: Metric) -> float | None:
    return sample.fact(metric.name)


def _by_label(
    sample: EngineSample, metric: Metric, but: frozenset[tuple[str, ...]] = frozenset()
) -> float | None:
    """The sum over the values of the metric's label but some; None without any other."""
    found = [
        value
        for (name, labels), value in sample.facts.items()
        if name == metric.name and labels not in but
    ]
    return sum(found) if found else None


def _cached(sample: EngineSample) -> float | None:
    by_source = fact.INPUT_TOKENS_BY_SOURCE.name
    sources = {key[1]: value for key, value in sample.facts.items() if key[0] == by_source}
    if sources:
        return sum(value for source, value in sources.items() if source != (_COMPUTED_HERE,))
    cached = _value(sample, fact.CACHED_INPUT_TOKENS)
    return _value(sample, fact.PREFIX_CACHE_HIT_TOKENS) if cached is None else cached
