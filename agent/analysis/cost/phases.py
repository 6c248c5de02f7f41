"""Prefill and decode of requests as arrays: when each was, and what it does in one second."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import fsum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent.analysis.efficiency.serving import Serving
from agent.analysis.efficiency.time_range import TimeRange, covered_s
from agent.analysis.efficiency.unseen_time import FREE_TOKENS
from agent.analysis.efficiency.work import RequestWork, TokenWork
from agent.analysis.physics.roofline import Roof
from agent.records.model import Work

Array = NDArray[np.float64]

# How long prefill takes, in seconds.
PrefillSeconds = Callable[[TokenWork], float]

# The part of their roofline that GPUs reach in prefill where no engine timed it, and the least part
# that is believed.
_EFFICIENCY, _LEAST_EFFICIENCY = 0.5, 0.2


class Loads(NamedTuple):
    """What phases do in one second of their time; each column has a value for each phase.

    Of prefill: how many prompts there are, their tokens, FLOPs and bytes of KV cache, the part of a
    prompt that is done, and the seconds of the GPUs that it takes, 0 where that is unknown. Of
    decode: streams, their tokens, and the FLOPs and bytes of KV cache of one step.
    """

    prompts: Array
    prompt_tokens: Array
    prompt_flops: Array
    prompt_bytes: Array
    prompt_parts: Array
    prompt_s: Array
    streams: Array
    stream_tokens: Array
    step_flops: Array
    step_bytes: Array

    @classmethod
    def of(cls, columns: Array) -> "Loads":
        """From one row for each phase."""
        return cls(*columns.T)


@dataclass(frozen=True, slots=True)
class Phases:
    """All phases of some requests: `owners` are places in the list of requests.

    `cached_flops` and `cached_bytes` are the part of each prefill that its cached tokens add.
    """

    owners: NDArray[np.intp]
    begins: Array
    ends: Array
    loads: Array
    cached_flops: Array
    cached_bytes: Array


class _Phase(NamedTuple):
    time: TimeRange
    loads: tuple[float, ...]
    cached: tuple[float, float] = (0.0, 0.0)


def phases(works: Sequence[RequestWork], seconds: PrefillSeconds) -> Phases:
    """The phases of requests, from the whole work of each."""
    found = [(n, phase) for n, work in enumerate(works) for phase in _phases(work, seconds)]
    # Sums of floats depend on their order.
    found.sort(key=lambda each: each[1])
    each = [phase for _, phase in found]
    cached = np.array([phase.cached for phase in each], dtype=float).reshape(-1, 2)
    loads = np.array([phase.loads for phase in each], dtype=float)
    return Phases(
        owners=np.array([owner for owner, _ in found], dtype=np.intp),
        begins=np.array([phase.time.from_at for phase in each], dtype=float),
        ends=np.array([phase.time.until for phase in each], dtype=float),
        loads=loads.reshape(-1, len(Loads._fields)),
        cached_flops=cached[:, 0],
        cached_bytes=cached[:, 1],
    )


def prefill_seconds(works: Sequence[RequestWork], serving: Serving) -> PrefillSeconds:
    """How long prefill takes here, by the prompts that the engine timed.

    In proportion to the roofline, or to the tokens where GPUs or model are unknown; then 0 without
    a timed prompt. A short timed prompt shows only how long a step takes at least.
    """
    roof = serving.roof
    timed = [work for work in works if work.activity.timed]
    if roof is None:
        longest = _longest(timed, lambda work: work.prefill.tokens)
        tokens = fsum(max(work.prefill.tokens, FREE_TOKENS) for work in longest)
        each_s = _prefilling_s(longest) / tokens if tokens else 0.0
        return lambda work: work.tokens * each_s
    longest = _longest(timed, lambda work: work.prefill.flops)
    weights = TokenWork(kv_bytes=serving.weight_bytes(1.0, 1.0))
    least_s = fsum(_least_s(roof, work.prefill.plus(weights)) for work in longest)
    whole_s = _prefilling_s(longest)
    reached = min(max(least_s / whole_s, _LEAST_EFFICIENCY), 1.0) if whole_s else _EFFICIENCY
    return lambda work: _least_s(roof, work) / reached


def _least_s(roof: Roof, work: TokenWork) -> float:
    return roof.seconds(Work(work.flops, work.kv_bytes))


def _longest(
    works: Sequence[RequestWork], size: Callable[[RequestWork], float]
) -> list[RequestWork]:
    """Those at least half as large as the largest: small prompts take a whole step too."""
    largest = max(map(size, works), default=0.0)
    return [work for work in works if size(work) >= largest / 2]


def _prefilling_s(works: Sequence[RequestWork]) -> float:
    """Seconds in which any of them was in prefill."""
    ranges = [work.activity.prefill for work in works]
    if not ranges:
        return 0.0
    return covered_s(ranges, TimeRange(min(ranges).from_at, max(each.until for each in ranges)))


def _phases(work: RequestWork, seconds: PrefillSeconds) -> Iterator[_Phase]:
    """The phases with known work."""
    if work.prefill.tokens or work.prefill.flops:
        yield _prefill(work, work.prefill_time, seconds)
    if work.decode.tokens:
        yield _decode(work, work.decode_time)


def _prefill(work: RequestWork, time: TimeRange, seconds: PrefillSeconds) -> _Phase:
    whole, length_s = work.prefill, time.length_s
    each = [value / length_s for value in (*whole, 1.0, seconds(whole))]
    loads = (1.0, *each, 0.0, 0.0, 0.0, 0.0)
    return _Phase(time, loads, (work.cached.flops / length_s, work.cached.kv_bytes / length_s))


def _decode(work: RequestWork, time: TimeRange) -> _Phase:
    streams, each = float(work.activity.choices), work.decode
    step = each.times(streams / each.tokens)
    loads = (*[0.0] * 6, streams, each.tokens / time.length_s, step.flops, step.kv_bytes)
    return _Phase(time, loads)
