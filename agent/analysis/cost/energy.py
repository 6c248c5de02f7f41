"""Energy of some time, from the energy counters of GPUs."""

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from math import fsum

from agent.analysis.efficiency.counter_growth import counter_increase
from agent.analysis.efficiency.time_range import TimeRange
from agent.catalog.gpu_facts import ENERGY
from agent.records.gpu import GpuSample

# Unix seconds and joules.
_Point = tuple[float, float]


def energy_joules(
    samples: Iterable[GpuSample], gpus: Collection[str], time: TimeRange
) -> float | None:
    """Joules that these GPUs (UUIDs) drew in `time`; None where one's samples do not span it.

    Energy is taken to flow evenly between two samples. What a GPU drew between its last sample and
    a counter reset is unknown, so that the result is then a lower bound.
    """
    counted: dict[str, list[_Point]] = {gpu: [] for gpu in gpus}
    for sample in samples:
        joules = sample.fact(ENERGY.name)
        if sample.gpu in counted and joules is not None:
            counted[sample.gpu].append((sample.at, joules))
    drawn = [_drawn(sorted(points), time) for points in counted.values()]
    known = [joules for joules in drawn if joules is not None]
    return fsum(known) if known and len(known) == len(drawn) else None


def _drawn(points: Sequence[_Point], time: TimeRange) -> float | None:
    if not points or points[0][0] > time.from_at or points[-1][0] < time.until:
        return None
    return fsum(
        (counter_increase(before, after) or 0.0) * TimeRange(begun, ended).share_in(time)
        for (begun, before), (ended, after) in pairwise(points)
        if begun < ended
    )
