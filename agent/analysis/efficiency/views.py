"""How well the GPUs were used over a whole window, as three sources tell it."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import fsum

from agent.analysis.efficiency.intervals import Interval
from agent.analysis.efficiency.observed import Observed
from agent.analysis.efficiency.phases import Phases, utilisation
from agent.analysis.efficiency.serving import Serving
from agent.catalog import gpu_facts
from agent.records.gpu import GpuSample
from agent.records.model import Work


class Source(StrEnum):
    """Where a figure comes from."""

    REQUESTS = "requests"
    ENGINE = "engine"
    HARDWARE = "hardware"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """MFU and MBU over the whole window, idle time in it, None where the source does not tell.

    `requests` is our count of what the requests with a row needed at least; `engine` is the
    engine's own estimate of what it did; `hardware` is the activity of tensor cores, at the clock
    that they had, and of the memory.
    """

    source: Source
    mfu: float | None = None
    mbu: float | None = None


def requests_view(phases: Phases | None, observed: Observed, serving: Serving) -> View:
    """What the requests needed."""
    if phases is None:
        return View(source=Source.REQUESTS)
    mfu, mbu = utilisation(phases.work, observed.window.length_s, serving)
    return View(source=Source.REQUESTS, mfu=mfu, mbu=mbu)


def engine_view(observed: Observed, serving: Serving) -> View:
    """What the engine says of itself, over the time for which it counted."""
    seconds = fsum(
        stretch.interval.within(observed.window).length_s
        for stretch in observed.stretches
        if stretch.growth.flops is not None
    )
    growth = observed.growth
    if growth.flops is None:
        return View(source=Source.ENGINE)
    moved = (growth.read_bytes or 0.0) + (growth.written_bytes or 0.0)
    # The counters are of one GPU of each rank, added over the ranks.
    gpus = serving.parallelism.gpus / observed.ranks
    mfu, mbu = utilisation(Work(growth.flops * gpus, moved * gpus), seconds, serving)
    known = growth.read_bytes is not None
    return View(source=Source.ENGINE, mfu=mfu, mbu=mbu if known else None)


def hardware_view(samples: Iterable[GpuSample], window: Interval) -> View:
    """What the counters of the GPUs say: the mean of the readings of each, then over all."""
    tensor: defaultdict[str, list[float]] = defaultdict(list)
    memory: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if not window.from_at < sample.at <= window.until:
            continue
        active, moved = (
            sample.fact(gpu_facts.TENSOR_ACTIVE.name),
            sample.fact(gpu_facts.DRAM_ACTIVE.name),
        )
        speed = clock_ratio(sample)
        if active is not None and speed is not None:
            tensor[sample.gpu].append(active * speed)
        if moved is not None:
            memory[sample.gpu].append(moved)
    return View(source=Source.HARDWARE, mfu=_mean_of_means(tensor), mbu=_mean_of_means(memory))


def clock_ratio(sample: GpuSample) -> float | None:
    """The clock of the SMs over their highest, at which peaks are told; None where unknown."""
    now = sample.fact(gpu_facts.CLOCK.name, "sm")
    highest = sample.fact(gpu_facts.CLOCK_MAX.name, "sm")
    return min(now / highest, 1.0) if now is not None and highest else None


def _mean_of_means(by_gpu: dict[str, list[float]]) -> float | None:
    means = [fsum(values) / len(values) for values in by_gpu.values()]
    return fsum(means) / len(means) if means else None
