"""Prefill and decode of a window under the roofline: MFU, MBU, and what bounds them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import fsum

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
    """What the requests with a row needed at least, and where it stood by phase.

    The seconds of a phase are those in which any request was in it; where both go on at once, they
    are seconds of both. `prefill_s` is None where of too many prompts nobody saw how long they
    took. `busy` is both phases while the engine worked. A phase is None where there was nothing of
    it, or no time is known for it.
    """

    prefill_work: Work
    decode_work: Work
    prefill_s: float | None
    decode_s: float
    prefill: Phase | None
    decode: Phase | None
    busy: Phase | None
    steps: StepSource

    @property
    def work(self) -> Work:
        """Both phases."""
        return self.prefill_work + self.decode_work


# Of all tokens. Of so few prompts the answer's end may be all that was seen, and so many output
# tokens are what the edges of windows blur.
_FEW = 0.05


def phases(
    observed: Observed, active: Sequence[Activity], loads: Sequence[RequestLoad], serving: Serving
) -> Phases | None:
    """The window's phases.

    None where the model is not known, or the engine worked most of the window and no row tells for
    whom.
    """
    window, full = observed.window, observed.cache_full
    busy_s = time_parts(observed, active).busy_s
    if serving.model is None or (not loads and busy_s > window.length_s / 2):
        return None
    prefill, decode, steps = _works(observed, active, loads, serving)
    prefill_s, decode_s = _prefill_s(loads, window), covered_s(_decoding(loads), window)
    return Phases(
        prefill_work=prefill,
        decode_work=decode,
        prefill_s=prefill_s,
        decode_s=decode_s,
        prefill=_phase(prefill, prefill_s or 0.0, serving, cache_full=False),
        decode=_phase(decode, decode_s, serving, cache_full=full),
        busy=_phase(prefill + decode, busy_s, serving, cache_full=full),
        steps=steps.source,
    )


def _prefill_s(loads: Sequence[RequestLoad], window: Interval) -> float | None:
    """Seconds in which any prompt was computed; None where too many have no length."""
    untimed = sum(load.computed.tokens for load in loads if not load.activity.prefill.length_s)
    if untimed > _FEW * sum(load.computed.tokens for load in loads):
        return None
    return covered_s((load.activity.prefill for load in loads), window)


def _decoding(loads: Sequence[RequestLoad]) -> Iterator[Interval]:
    return (load.activity.decode for load in loads if load.decode.tokens)


def _works(
    observed: Observed, active: Sequence[Activity], loads: Sequence[RequestLoad], serving: Serving
) -> tuple[Work, Work, Steps]:
    """Prefill and decode of the rows, with the weights that those steps read that were theirs."""
    seen = seen_loads(loads)
    unseen = unseen_loads(seen, unseen_tokens(observed, active), serving)
    prompts = seen.prefill.tokens + unseen.prefill.tokens
    decoded = seen.decode.tokens + unseen.decode.tokens
    steps = count_steps(observed, loads, decoded)
    filled_bytes = serving.weight_bytes(steps.prefill, prompts)
    decoded_bytes = serving.weight_bytes(steps.decode, decoded)
    if unseen.decode.tokens > _FEW * decoded:
        theirs = _steps_of_rows(loads, observed.window)
        decoded_bytes *= min(_share(theirs, steps.decode), 1.0)
    return (
        _with_weights(seen.prefill, filled_bytes * _share(seen.prefill.tokens, prompts)),
        _with_weights(seen.decode, decoded_bytes),
        steps,
    )


def _steps_of_rows(loads: Sequence[RequestLoad], window: Interval) -> float:
    """Steps in which a request with a row decoded: their tokens over how many did at once."""
    decoding = list(_decoding(loads))
    together_s = fsum(interval.within(window).length_s for interval in decoding)
    tokens = fsum(load.decode.tokens for load in loads)
    return tokens * _share(covered_s(decoding, window), together_s)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


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
