"""Where work stands under the roofline: what bounds it, and how close it comes to the bound.

After Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009.
"""

from dataclasses import dataclass
from enum import StrEnum

from agent.records.model import Work


class Bound(StrEnum):
    """What keeps work from going faster. The roofs of a GPU, and the memory that caps the batch."""

    COMPUTE = "compute-bound"
    BANDWIDTH = "bandwidth-bound"
    CAPACITY = "memory-capacity-bound"


# What to do first, best first.
ACTIONS = {
    Bound.COMPUTE: (
        "quantise weights and activations to FP8, where the GPU has it",
        "serve repeated prefixes from the prefix cache",
        "spread the model over more GPUs, or add replicas",
    ),
    Bound.BANDWIDTH: (
        "run more requests at once: raise the limit on running sequences",
        "quantise the weights, and the KV cache for long contexts",
        "decode speculatively while few requests run",
    ),
    Bound.CAPACITY: (
        "keep the KV cache in FP8",
        "quantise the weights, which leaves more room for cache",
        "spread the model over more GPUs, or take GPUs with more memory",
        "lower the longest context that is allowed",
    ),
}


@dataclass(frozen=True, slots=True)
class Roof:
    """The best of all GPUs that share the work."""

    flops_per_s: float
    bytes_per_s: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte from which on computing is the bound."""
        return self.flops_per_s / self.bytes_per_s

    def attainable_flops_per_s(self, intensity: float) -> float:
        """The most FLOP/s that work of this intensity can reach."""
        return min(self.flops_per_s, intensity * self.bytes_per_s)

    def seconds(self, work: Work) -> float:
        """The least time that the work can take, computing and moving at the same time."""
        return max(work.flops / self.flops_per_s, work.bytes_moved / self.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflinePosition:
    """Where work stood: FLOPs per byte, FLOP/s, and the FLOP/s that its intensity allows."""

    intensity: float
    ridge: float
    achieved_flops_per_s: float
    attainable_flops_per_s: float

    @property
    def share(self) -> float:
        """Achieved over attainable: near 1 the bound is real, far below something else waits."""
        return self.achieved_flops_per_s / self.attainable_flops_per_s


def intensity(work: Work) -> float | None:
    """FLOPs per byte; None where nothing was moved."""
    return work.flops / work.bytes_moved if work.bytes_moved > 0 else None


def position(work: Work, seconds: float, roof: Roof) -> RooflinePosition | None:
    """Where work that took so long stood; None where no time passed or nothing was done."""
    found = intensity(work)
    if not found or seconds <= 0:
        return None
    return RooflinePosition(
        intensity=found,
        ridge=roof.ridge,
        achieved_flops_per_s=work.flops / seconds,
        attainable_flops_per_s=roof.attainable_flops_per_s(found),
    )


def bound(work: Work, roof: Roof, *, cache_full: bool = False) -> Bound | None:
    """What bounds the work; None where that cannot be told.

    Below the ridge a larger batch would help. Where the KV cache is full, and so no more requests
    can run, it is memory capacity and not bandwidth that stands in the way.
    """
    found = intensity(work)
    if found is None:
        return None
    if found >= roof.ridge:
        return Bound.COMPUTE
    return Bound.CAPACITY if cache_full else Bound.BANDWIDTH
