"""How well the GPUs were used over a whole window, as three sources tell it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import fsum

from agent.analysis.efficiency.observation import Observation
from agent.analysis.efficiency.phase_work import PhaseTotals, utilisation
from agent.analysis.efficiency.serving import Serving
from agent.analysis.efficiency.time_range import TimeRange
from agent.catalog import gpu_facts
from agent.records.gpu import GpuSample
from agent.records.model import Work


class Source(StrEnum):
    """Where a figure comes from."""

    REQUESTS = "requests"
    ENGINE = "engine"
    HARDWARE = "hardware"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceUtilisation:
    """MFU and MBU of the window, idle time in it, None where the source does not tell.

    `requests` is our count of what the requests with a row needed at least, without the time of
    which nothing is known; `engine` is the engine's own estimate of what it did; `hardware` is the
    activity of tensor cores, at the clock that they had, and of the memory.
    """

    source: Source
    mfu: float | None = None
    mbu: float | None = None


def requests_utilisation(phases: PhaseTotals | None, serving: Serving) -> SourceUtilisation:
    """What the requests needed."""
    if phases is None:
        return SourceUtilisation(source=Source.REQUESTS)
    mfu, mbu = utilisation(phases.work, phases.known_s, serving)
    return SourceUtilisation(source=Source.REQUESTS, mfu=mfu, mbu=mbu)


def engine_utilisation(observed: Observation, serving: Serving) -> SourceUtilisation:
    """What the engine says of itself, over the time for which it counted."""
    seconds = fsum(
        stretch.interval.within(observed.window).length_s
        for stretch in observed.stretches
        if stretch.growth.flops is not None
    )
    growth = observed.growth
    if growth.flops is None:
        return SourceUtilisation(source=Source.ENGINE)
    moved = (growth.read_bytes or 0.0) + (growth.written_bytes or 0.0)
    # The counters are of one GPU of each rank, added over the ranks.
    gpus = serving.parallelism.gpus / observed.ranks
    mfu, mbu = utilisation(Work(growth.flops * gpus, moved * gpus), seconds, serving)
    known = growth.read_bytes is not None
    return SourceUtilisation(source=Source.ENGINE, mfu=mfu, mbu=mbu if known else None)


def hardware_utilisation(samples: Iterable[GpuSample], window: TimeRange) -> SourceUtilisation:
    """What the counters of the GPUs say: the mean of the readings of each, then over all."""
    of_gpu: defaultdict[str, list[GpuSample]] = defaultdict(list)
    for sample in samples:
        if window.from_at < sample.at <= window.until:
            of_gpu[sample.gpu].append(sample)
    return SourceUtilisation(
        source=Source.HARDWARE,
        mfu=_mean([_activity(readings, _tensor_share) for readings in of_gpu.values()]),
        mbu=_mean([_activity(readings, _memory_share) for readings in of_gpu.values()]),
    )


def _activity(
    readings: Sequence[GpuSample], share_in: Callable[[GpuSample], float | None]
) -> float | None:
    """The mean of one GPU's readings.

    None where they are all 0 although kernels ran: profiling counters that stand still tell 0.
    """
    shares = [share_in(reading) for reading in readings]
    if not any(shares) and any(map(_in_use, readings)):
        return None
    return _mean(shares)


def _in_use(reading: GpuSample) -> bool:
    return bool(reading.fact(gpu_facts.UTILIZATION.name))


def _tensor_share(reading: GpuSample) -> float | None:
    active, speed = reading.fact(gpu_facts.TENSOR_ACTIVE.name), clock_ratio(reading)
    return None if active is None or speed is None else active * speed


def _memory_share(reading: GpuSample) -> float | None:
    return reading.fact(gpu_facts.DRAM_ACTIVE.name)


def clock_ratio(sample: GpuSample) -> float | None:
    """The clock of the SMs over their highest, at which peaks are told; None where unknown."""
    now = sample.fact(gpu_facts.CLOCK.name, "sm")
    highest = sample.fact(gpu_facts.CLOCK_MAX.name, "sm")
    return min(now / highest, 1.0) if now is not None and highest else None


def _mean(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return fsum(known) / len(known) if known else None
