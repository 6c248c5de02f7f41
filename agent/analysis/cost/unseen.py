"""The work of requests without a row, by what the engine counted beyond those with one."""

from collections.abc import Iterator, Sequence
from math import fsum
from typing import NamedTuple

import numpy as np

from agent.analysis.cost.phases import Loads, PrefillSeconds
from agent.analysis.cost.weights import OUTPUT_TOKEN_WEIGHT
from agent.analysis.efficiency.engine_observation import EngineObservation
from agent.analysis.efficiency.request_activity import Activities
from agent.analysis.efficiency.serving import Serving
from agent.analysis.efficiency.token_work import TokenWork, TokenWorks
from agent.analysis.efficiency.work import (
    RequestWorks,
    UnseenTokens,
    seen_work,
    unseen_work,
)
from agent.catalog import engine_facts as fact
from agent.records.columns import Array

# Differences of shared-out counts and of times below this are rounding errors.
_ROUNDING = 1e-6


class IntervalTimes(NamedTuple):
    """Busy seconds of each interval, and how long work takes in it.

    `rates` are the tokens that a stream decodes in a second, 0 where no row decodes.
    """

    busy_s: Array
    rates: Array
    prefill_s: PrefillSeconds


def unseen_loads(
    observed: EngineObservation,
    works: RequestWorks,
    serving: Serving,
    times: IntervalTimes,
) -> Array:
    """Loads of unseen work in each interval, spread over its busy seconds."""
    seen = seen_work(works)
    tokens = unseen_by_interval(observed, works.active)
    loads = np.zeros((len(Loads._fields), len(tokens)))
    for place, (interval, unseen) in enumerate(zip(observed.intervals, tokens, strict=True)):
        busy_s, rate = float(times.busy_s[place]), float(times.rates[place])
        if busy_s > _ROUNDING and any(unseen):
            work = unseen_work(seen, unseen, serving)
            counted = interval.growth.steps or 0.0
            steps = counted / busy_s if counted >= 1 else 0.0
            decode = _decode(work.decode, busy_s, rate or steps)
            (prefill_s,) = times.prefill_s(TokenWorks.of([work.prefill])).tolist()
            if serving.roof is None:
                # Prompts that the engine timed may have shared that time with unseen ones.
                share = _token_share(work.prefill.tokens, interval.growth.output_tokens or 0.0)
                prefill_s = min(prefill_s, busy_s * share)
            loads[:, place] = *_prefill(work.prefill, busy_s, prefill_s), *decode
    return loads


def _token_share(prompt: float, output: float) -> float:
    """The share of prompt tokens in time, where nothing is known but tokens."""
    weighed = prompt + OUTPUT_TOKEN_WEIGHT * output
    return prompt / weighed if weighed > 0 else 0.0


def _prefill(work: TokenWork, busy_s: float, prefill_s: float) -> Iterator[float]:
    """Nothing shows how many prompts there were."""
    yield 0.0
    yield from (each / busy_s for each in (*work, 0.0, prefill_s))


def _decode(work: TokenWork, busy_s: float, rate: float) -> Iterator[float]:
    """One stream where nothing shows how many there were."""
    tokens = work.tokens / busy_s
    streams = tokens / rate if rate else min(tokens, 1.0)
    step = work.times(streams / work.tokens) if work.tokens else work
    yield from (streams, tokens, step.flops, step.kv_bytes)


def unseen_by_interval(observed: EngineObservation, active: Activities) -> list[UnseenTokens]:
    """The unseen tokens of each interval; they add up to those of the observed time.

    Tokens of a row are taken to come evenly, so that an interval may have more of them or fewer
    than the engine counted. Only what is more in all intervals together is unseen.
    """
    computed, output, first = [], [], []
    of_input = observed.as_counted(active, fact.INPUT_TOKENS)
    of_output = observed.as_counted(active, fact.OUTPUT_TOKENS)
    for interval in observed.intervals:
        inside = interval.time.within(observed.time)
        growth = interval.growth.times(interval.time.share_in(observed.time))
        prompts = of_input.input_counted_in(inside).sum()
        computed.append((growth.computed_tokens or 0.0) - float(prompts))
        output.append((growth.output_tokens or 0.0) - float(of_output.output_in(inside).sum()))
        first.append((growth.first_tokens or 0.0) - float(active.first_in(inside).sum()))
    found = zip(_surplus(computed), _surplus(output), _surplus(first), strict=True)
    counted = observed.growth.first_tokens is not None
    return [UnseenTokens(*each[:2], each[2] if counted else None) for each in found]


def _surplus(balances: Sequence[float]) -> list[float]:
    """What is above 0, scaled to the sum of all."""
    total, more = fsum(balances), fsum(each for each in balances if each > 0)
    if total <= _ROUNDING:
        return [0.0] * len(balances)
    return [each * total / more if each > _ROUNDING else 0.0 for each in balances]
