"""MFU and MBU of a minute by three sources: its requests, the engine and the hardware."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import fsum

from agent.analysis.efficiency.engine_observation import EngineObservation
from agent.analysis.efficiency.serving import Serving
from agent.catalog import gpu_facts
from agent.records.gpu import GpuSample
from agent.records.minute import EngineWork
from agent.records.model import Work


class Source(StrEnum):
    """Where a figure comes from."""

    REQUESTS = "requests"
    ENGINE = "engine"
    HARDWARE = "hardware"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceUtilisation:
    """MFU and MBU of a minute with its idle time, as ratios; None where the source has no figure.

    `requests` counts what the requests with a row needed at least, over the time that is known.
    `engine` is the engine's own estimate. `hardware` is the activity of the tensor cores at their
    clock, and of the memory.
    """

    source: Source
    mfu: float | None = None
    mbu: float | None = None


def requests_utilisation(work: EngineWork, serving: Serving) -> SourceUtilisation:
    """By what the requests needed, over the known seconds."""
    if work.needed is None:
        return SourceUtilisation(source=Source.REQUESTS)
    mfu, mbu = serving.utilisation(work.needed, work.known_s)
    return SourceUtilisation(source=Source.REQUESTS, mfu=mfu, mbu=mbu)


def engine_utilisation(observed: EngineObservation, serving: Serving) -> SourceUtilisation:
    """By the engine's own counters, over the time in which it counted."""
    seconds = fsum(
        interval.time.within(observed.time).length_s
        for interval in observed.intervals
        if interval.growth.flops is not None
    )
    growth = observed.growth
    if growth.flops is None:
        return SourceUtilisation(source=Source.ENGINE)
    moved = (growth.read_bytes or 0.0) + (growth.written_bytes or 0.0)
    # The counters are of one GPU of each rank, summed over the ranks.
    gpus = serving.parallelism.gpus / observed.ranks
    mfu, mbu = serving.utilisation(Work(growth.flops * gpus, moved * gpus), seconds)
    known = growth.read_bytes is not None
    return SourceUtilisation(source=Source.ENGINE, mfu=mfu, mbu=mbu if known else None)


def hardware_utilisation(samples: Iterable[GpuSample]) -> SourceUtilisation:
    """By the GPUs' counters: the mean over the samples of each GPU, then over the GPUs."""
    of_gpu: defaultdict[str, list[GpuSample]] = defaultdict(list)
    for sample in samples:
        of_gpu[sample.gpu].append(sample)
    return SourceUtilisation(
        source=Source.HARDWARE,
        mfu=_mean([_activity(of_one, _tensor_share) for of_one in of_gpu.values()]),
        mbu=_mean([_activity(of_one, _memory_share) for of_one in of_gpu.values()]),
    )


def _activity(
    samples: Sequence[GpuSample], share_in: Callable[[GpuSample], float | None]
) -> float | None:
    """The mean over one GPU's samples.

    None where all are 0 although kernels ran: profiling counters that stand still read 0.
    """
    shares = [share_in(sample) for sample in samples]
    if not any(shares) and any(map(_in_use, samples)):
        return None
    return _mean(shares)


def _in_use(sample: GpuSample) -> bool:
    return bool(sample.fact(gpu_facts.UTILIZATION.name))


def _tensor_share(sample: GpuSample) -> float | None:
    active, speed = sample.fact(gpu_facts.TENSOR_ACTIVE.name), clock_ratio(sample)
    return None if active is None or speed is None else active * speed


def _memory_share(sample: GpuSample) -> float | None:
    return sample.fact(gpu_facts.DRAM_ACTIVE.name)


def clock_ratio(sample: GpuSample) -> float | None:
    """The SM clock over its maximum, at which peaks are stated; at most 1, None where unknown."""
    now = sample.fact(gpu_facts.CLOCK.name, "sm")
    highest = sample.fact(gpu_facts.CLOCK_MAX.name, "sm")
    return min(now / highest, 1.0) if now is not None and highest else None


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of the known values; None where none is known."""
    known = [value for value in values if value is not None]
    return fsum(known) / len(known) if known else None
