"""Energy of a window, from the counters of its GPUs."""

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from math import fsum

from agent.analysis.efficiency.counter_growth import counter_increase
from agent.analysis.efficiency.time_range import TimeRange
from agent.catalog.gpu_facts import ENERGY
from agent.records.gpu import GpuSample

_Point = tuple[float, float]


def energy_joules(
    samples: Iterable[GpuSample], gpus: Collection[str], window: TimeRange
) -> float | None:
    """Joules that these GPUs (UUIDs) drew in the window; None where one's readings do not span it.

    Between two readings energy is taken to flow evenly. A counter that fell began anew, and what it
    counted before is lost: then this is the least that was drawn.
    """
    told: dict[str, list[_Point]] = {gpu: [] for gpu in gpus}
    for sample in samples:
        joules = sample.fact(ENERGY.name)
        if sample.gpu in told and joules is not None:
            told[sample.gpu].append((sample.at, joules))
    drawn = [_drawn(sorted(points), window) for points in told.values()]
    known = [joules for joules in drawn if joules is not None]
    return fsum(known) if known and len(known) == len(drawn) else None


def joules_per_output_token(joules: float | None, output_tokens: float | None) -> float | None:
    """Energy for each token that came out in the same time; None where either is unknown or 0."""
    return joules / output_tokens if joules is not None and output_tokens else None


def _drawn(points: Sequence[_Point], window: TimeRange) -> float | None:
    if not points or points[0][0] > window.from_at or points[-1][0] < window.until:
        return None
    return fsum(
        (counter_increase(before, after) or 0.0) * TimeRange(begun, ended).share_in(window)
        for (begun, before), (ended, after) in pairwise(points)
        if begun < ended
    )
