"""Prefill and decode of requests as arrays: when each was, and what it does in one second."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from agent.analysis.efficiency.serving import Serving
from agent.analysis.efficiency.time_range import EVER, TimeRanges, covered_s
from agent.analysis.efficiency.token_work import TokenWorks
from agent.analysis.efficiency.unseen_time import FREE_TOKENS
from agent.analysis.efficiency.work import RequestWorks
from agent.analysis.physics.roofline import Roof
from agent.records.columns import Array, Places

# How long prefill takes, in seconds.
PrefillSeconds = Callable[[TokenWorks], Array]

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
        """From an array with a row for each column."""
        return cls(*columns)


# The first columns, which are of prompts.
PROMPT_LOADS = Loads._fields.index("streams")


@dataclass(frozen=True, slots=True, eq=False)
class Phases:
    """All phases of some requests: `owners` are places in the list of requests.

    `loads` has a row for each column of Loads. `cached_flops` and `cached_bytes` are the part of
    each prefill that its cached tokens add.
    """

    owners: Places
    begins: Array
    ends: Array
    loads: Array
    cached_flops: Array
    cached_bytes: Array


def phases(works: RequestWorks, seconds: PrefillSeconds) -> Phases:
    """The phases with known work of requests, from the whole work of each."""
    prefills, decodes = np.flatnonzero(works.prefills), np.flatnonzero(works.decodes)
    times = [works.prefill_time.chosen(prefills), works.decode_time.chosen(decodes)]
    from_at, until = (np.concatenate(each) for each in zip(*times, strict=True))
    loads = np.zeros((len(Loads._fields), from_at.size))
    loads[:PROMPT_LOADS, : prefills.size] = _prompts(works.chosen(prefills), times[0], seconds)
    loads[PROMPT_LOADS:, prefills.size :] = _streams(works.chosen(decodes), times[1])
    cached = works.cached.chosen(prefills).times(1.0 / times[0].length_s)
    return Phases(
        owners=np.concatenate([prefills, decodes]),
        begins=from_at,
        ends=until,
        loads=loads,
        cached_flops=np.append(cached.flops, np.zeros(decodes.size)),
        cached_bytes=np.append(cached.kv_bytes, np.zeros(decodes.size)),
    )


def _prompts(works: RequestWorks, time: TimeRanges, seconds: PrefillSeconds) -> Array:
    """What prefills do in a second, in the order of Loads."""
    whole = works.prefill
    done = np.ones_like(time.from_at)
    return np.stack([done, *(each / time.length_s for each in (*whole, done, seconds(whole)))])


def _streams(works: RequestWorks, time: TimeRanges) -> Array:
    """What decodes do in a second, in the order of Loads."""
    streams, decode = works.active.choices, works.decode
    step = decode.times(streams / decode.tokens)
    return np.stack([streams, decode.tokens / time.length_s, step.flops, step.kv_bytes])


def prefill_seconds(works: RequestWorks, serving: Serving) -> PrefillSeconds:
    """How long prefill takes here, by the prompts that the engine timed.

    In proportion to the roofline, or to the tokens where GPUs or model are unknown; then 0 without
    a timed prompt. A short timed prompt shows only how long a step takes at least.
    """
    roof = serving.roof
    timed = works.chosen(works.active.timed)
    if roof is None:
        longest = _longest(timed, timed.prefill.tokens)
        tokens = float(np.maximum(longest.prefill.tokens, FREE_TOKENS).sum())
        each_s = covered_s(longest.active.prefill, EVER) / tokens if tokens else 0.0
        return lambda work: work.tokens * each_s
    longest = _longest(timed, timed.prefill.flops)
    weights = serving.weight_bytes(1.0, 1.0)
    least_s = float(_least_s(roof, longest.prefill, weights).sum())
    whole_s = covered_s(longest.active.prefill, EVER)
    reached = min(max(least_s / whole_s, _LEAST_EFFICIENCY), 1.0) if whole_s else _EFFICIENCY
    return lambda work: _least_s(roof, work) / reached


def _least_s(roof: Roof, work: TokenWorks, more_bytes: float = 0.0) -> Array:
    moved = work.kv_bytes + more_bytes
    found: Array = np.maximum(work.flops / roof.flops_per_s, moved / roof.bytes_per_s)
    return found


def _longest(works: RequestWorks, sizes: Array) -> RequestWorks:
    """Those at least half as large as the largest: small prompts take a whole step too."""
    return works.chosen(sizes >= sizes.max(initial=0.0) / 2)
