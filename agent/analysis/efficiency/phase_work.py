"""Prefill and decode of a window under the roofline: MFU, MBU, and what bounds them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import fsum
from typing import NamedTuple

from agent.analysis.efficiency.busy_time import time_parts
from agent.analysis.efficiency.observation import Observation
from agent.analysis.efficiency.request_activity import RequestActivity
from agent.analysis.efficiency.serving import Serving
from agent.analysis.efficiency.time_range import TimeRange, covered_s
from agent.analysis.efficiency.work import (
    RequestWork,
    Steps,
    StepSource,
    TokenWork,
    count_steps,
    seen_work,
    unseen_tokens,
    unseen_work,
)
from agent.analysis.physics.roofline import Bound, RooflinePosition, bound, position
from agent.analysis.physics.utilisation import bandwidth_utilisation, flops_utilisation
from agent.records.model import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseUse:
    """Work, and how well it used the GPUs in the seconds in which it went on.

    What needs a peak that is not known is None.
    """

    seconds: float
    work: Work
    mfu: float | None
    mbu: float | None
    position: RooflinePosition | None
    bound: Bound | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTotals:
    """What the requests with a row needed at least, and where it stood by phase.

    The seconds of a phase are those in which any request was in it; where both go on at once, they
    are seconds of both, and the weights that they read together, `shared_bytes`, are in the work of
    both. `prefill_s` is None where of too many prompts nobody saw how long they took. `busy` is
    both phases while the engine worked. A phase is None where there was nothing of it, or no time
    is known for it. `known_s` are the seconds of the window of which it is known what was done.
    """

    prefill_work: Work
    decode_work: Work
    shared_bytes: float
    prefill_s: float | None
    decode_s: float
    prefill: PhaseUse | None
    decode: PhaseUse | None
    busy: PhaseUse | None
    steps: StepSource
    known_s: float

    @property
    def work(self) -> Work:
        """Both phases, what they shared once."""
        return _once(self.prefill_work, self.decode_work, self.shared_bytes)


# Of all tokens. Of so few prompts the answer's end may be all that was seen, and so many output
# tokens are what the edges of windows blur.
_FEW = 0.05


def phases(
    observed: Observation,
    active: Sequence[RequestActivity],
    loads: Sequence[RequestWork],
    serving: Serving,
) -> PhaseTotals | None:
    """The window's phases.

    None where the model is not known, or for most of the window no row tells whether the engine
    worked, or for whom.
    """
    window, full_s = observed.window, observed.cache_full_s
    busy_s, idle_s, _ = time_parts(observed, active)
    if serving.model is None or (not loads and idle_s < window.length_s / 2):
        return None
    prefill, decode, shared_bytes, steps = _works(observed, active, loads, serving)
    prefill_s, decode_s = _prefill_s(loads, window), covered_s(_decoding(loads), window)
    both = _once(prefill, decode, shared_bytes)
    return PhaseTotals(
        prefill_work=prefill,
        decode_work=decode,
        shared_bytes=shared_bytes,
        prefill_s=prefill_s,
        decode_s=decode_s,
        prefill=_phase(prefill, prefill_s or 0.0, serving),
        decode=_phase(decode, decode_s, serving, cache_full=full_s > decode_s / 2),
        busy=_phase(both, busy_s, serving, cache_full=full_s > busy_s / 2),
        steps=steps,
        known_s=busy_s + idle_s,
    )


def _once(prefill: Work, decode: Work, shared_bytes: float) -> Work:
    return Work(
        prefill.flops + decode.flops, prefill.bytes_moved + decode.bytes_moved - shared_bytes
    )


def _prefill_s(loads: Sequence[RequestWork], window: TimeRange) -> float | None:
    """Seconds in which any prompt was computed; None where too many have no length."""
    untimed = sum(load.computed.tokens for load in loads if not load.activity.prefill.length_s)
    if untimed > _FEW * sum(load.computed.tokens for load in loads):
        return None
    return covered_s((load.activity.prefill for load in loads), window)


def _decoding(loads: Sequence[RequestWork]) -> Iterator[TimeRange]:
    return (load.activity.decode for load in loads if load.decode.tokens)


class _Works(NamedTuple):
    """What the rows needed, and the bytes of weights that are in the work of both phases."""

    prefill: Work
    decode: Work
    shared_bytes: float
    steps: StepSource


def _works(
    observed: Observation,
    active: Sequence[RequestActivity],
    loads: Sequence[RequestWork],
    serving: Serving,
) -> _Works:
    """Prefill and decode of the rows, with the weights that the steps read that were theirs."""
    seen = seen_work(loads)
    unseen = unseen_work(seen, unseen_tokens(observed, active), serving)
    prompts = seen.prefill.tokens + unseen.prefill.tokens
    decoded = seen.decode.tokens + unseen.decode.tokens
    steps = count_steps(observed, loads, decoded)
    prompts_of_rows, decode_of_rows = _share(seen.prefill.tokens, prompts), 1.0
    if unseen.decode.tokens > _FEW * decoded:
        theirs = _steps_of_rows(loads, observed.window)
        decode_of_rows = min(_share(theirs, steps.decode), 1.0)
    filling = _filling_steps(loads, prompts_of_rows, steps, observed.window)
    filled_bytes = serving.weight_bytes(filling, prompts)
    decoded_bytes = serving.weight_bytes(steps.decode, decoded)
    shared_bytes = min(
        filled_bytes - serving.weight_bytes(steps.prefill, prompts),
        decoded_bytes * _share(min(filling - steps.prefill, steps.decode), steps.decode),
    )
    return _Works(
        _with_weights(seen.prefill, filled_bytes * prompts_of_rows),
        _with_weights(seen.decode, decoded_bytes * decode_of_rows),
        shared_bytes * prompts_of_rows * decode_of_rows,
        steps.source,
    )


def _filling_steps(
    loads: Sequence[RequestWork], of_rows: float, steps: Steps, window: TimeRange
) -> float:
    """Steps that computed prompts, also those that decoded too: one for all prompts at once.

    Where there were fewer steps, more prompts shared one. A prompt of which no step is counted, as
    those are not that compute but a part of it, took one at least.
    """
    computed = [load for load in loads if load.computed.tokens]
    prompts = fsum(load.computed.tokens / load.activity.computed_tokens for load in computed)
    lasted = [load.activity.prefill for load in computed]
    together_s = fsum(interval.within(window).length_s for interval in lasted)
    at_once = _share(together_s, covered_s(lasted, window))
    at_most = max(steps.prefill + steps.decode, 1.0)
    return max(steps.prefill, min(_share(prompts / max(at_once, 1.0), of_rows), at_most))


def _steps_of_rows(loads: Sequence[RequestWork], window: TimeRange) -> float:
    """Steps in which a request with a row decoded: their tokens over how many did at once."""
    decoding = list(_decoding(loads))
    together_s = fsum(interval.within(window).length_s for interval in decoding)
    tokens = fsum(load.decode.tokens for load in loads)
    return tokens * _share(covered_s(decoding, window), together_s)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _with_weights(load: TokenWork, weight_bytes: float) -> Work:
    return Work(load.flops, load.kv_bytes + weight_bytes)


def _phase(
    work: Work, seconds: float, serving: Serving, *, cache_full: bool = False
) -> PhaseUse | None:
    if seconds <= 0 or work.flops <= 0:
        return None
    roof = serving.roof
    mfu, mbu = utilisation(work, seconds, serving)
    return PhaseUse(
        seconds=seconds,
        work=work,
        mfu=mfu,
        mbu=mbu,
        position=None if roof is None else position(work, seconds, roof),
        bound=None if roof is None else bound(work, roof, cache_full=cache_full),
    )


def utilisation(work: Work, seconds: float, serving: Serving) -> tuple[float | None, float | None]:
    """(MFU, MBU) of work that all GPUs shared; each None where its peak is unknown."""
    peak, bandwidth = serving.peak_flops_per_s, serving.bandwidth_bytes_per_s
    return (
        None
        if peak is None
        else flops_utilisation(work.flops, seconds, gpus=1, peak_flops_per_s=peak),
        None
        if bandwidth is None
        else bandwidth_utilisation(
            work.bytes_moved, seconds, gpus=1, bandwidth_bytes_per_s=bandwidth
        ),
    )
