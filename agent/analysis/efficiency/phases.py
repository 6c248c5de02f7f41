"""Prefill and decode of a window under the roofline: MFU, MBU, and what bounds them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agent.analysis.efficiency.activity import Activity
from agent.analysis.efficiency.busy import time_parts
from agent.analysis.efficiency.intervals import Interval, covered_s
from agent.analysis.efficiency.load import (
    Load,
    RequestLoad,
    Steps,
    StepSource,
    count_steps,
    seen_loads,
    unseen_loads,
    unseen_tokens,
)
from agent.analysis.efficiency.observed import Observed
from agent.analysis.efficiency.serving import Serving
from agent.analysis.physics.roofline import Bound, RooflinePosition, bound, position
from agent.analysis.physics.utilisation import bandwidth_utilisation, flops_utilisation
from agent.records.model import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
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
class Phases:
    """What the requests with a row needed at least: `work`, and where it stood by phase.

    The seconds of a phase are those in which any request was in it; where both go on at once, they
    are seconds of both. `busy` is both phases while the engine worked. None where there was nothing
    of it, or no time is known for it.
    """

    work: Work
    prefill: Phase | None
    decode: Phase | None
    busy: Phase | None
    steps: StepSource


def phases(
    observed: Observed, active: Sequence[Activity], loads: Sequence[RequestLoad], serving: Serving
) -> Phases | None:
    """The window's phases; None where the model is not known."""
    if serving.model is None:
        return None
    prefill, decode, steps = _works(observed, active, loads, serving)
    window, full = observed.window, observed.cache_full
    in_prefill_s = covered_s((load.activity.prefill for load in loads), window)
    in_decode_s = covered_s(_decoding(loads), window)
    busy_s = time_parts(observed, active).busy_s
    return Phases(
        work=prefill + decode,
        prefill=_phase(prefill, in_prefill_s, serving, cache_full=False),
        decode=_phase(decode, in_decode_s, serving, cache_full=full),
        busy=_phase(prefill + decode, busy_s, serving, cache_full=full),
        steps=steps.source,
    )


def _decoding(loads: Sequence[RequestLoad]) -> Iterator[Interval]:
    return (load.activity.decode for load in loads if load.decode.tokens)


def _works(
    observed: Observed, active: Sequence[Activity], loads: Sequence[RequestLoad], serving: Serving
) -> tuple[Work, Work, Steps]:
    """Prefill and decode with the weights that their steps read."""
    seen = seen_loads(loads)
    unseen = unseen_loads(seen, unseen_tokens(observed, active), serving)
    prompts = seen.prefill.tokens + unseen.prefill.tokens
    decoded = seen.decode.tokens + unseen.decode.tokens
    steps = count_steps(observed, loads, decoded)
    return (
        _with_weights(seen.prefill, serving.weight_bytes(steps.prefill, prompts)),
        _with_weights(seen.decode, serving.weight_bytes(steps.decode, decoded)),
        steps,
    )


def _with_weights(load: Load, weight_bytes: float) -> Work:
    return Work(load.flops, load.kv_bytes + weight_bytes)


def _phase(work: Work, seconds: float, serving: Serving, *, cache_full: bool) -> Phase | None:
    if seconds <= 0 or work.flops <= 0:
        return None
    roof = serving.roof
    mfu, mbu = utilisation(work, seconds, serving)
    return Phase(
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
