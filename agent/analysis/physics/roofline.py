"""The roofline model: what bounds some work, and how close to the bound it came.

Source: Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009.
"""

from dataclasses import dataclass
from enum import StrEnum

from agent.records.model import Work


class Bound(StrEnum):
    """What limits some work: a roof of the GPU, or the memory that caps the batch."""

    COMPUTE = "compute-bound"
    BANDWIDTH = "bandwidth-bound"
    CAPACITY = "memory-capacity-bound"


# What to do about each bound, best first.
ACTIONS = {
    Bound.COMPUTE: (
        "quantise weights and activations to FP8, if the GPU has it",
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
    """Peak and bandwidth of all GPUs that share the work."""

    flops_per_s: float
    bytes_per_s: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte; work of a higher intensity is compute-bound."""
        return self.flops_per_s / self.bytes_per_s

    def attainable_flops_per_s(self, intensity: float) -> float:
        """The highest FLOP/s that work of this intensity can reach."""
        return min(self.flops_per_s, intensity * self.bytes_per_s)

    def seconds(self, work: Work) -> float:
        """The least time of the work, with computing and moving at the same time."""
        return max(work.flops / self.flops_per_s, work.bytes_moved / self.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflinePosition:
    """Intensity of some work (FLOPs per byte), its FLOP/s, and the FLOP/s that it allows."""

    intensity: float
    ridge: float
    achieved_flops_per_s: float
    attainable_flops_per_s: float

    @property
    def share(self) -> float:
        """Achieved over attainable FLOP/s. Far below 1, something other than the GPU waits."""
        return self.achieved_flops_per_s / self.attainable_flops_per_s


def intensity(work: Work) -> float | None:
    """FLOPs per byte; None if nothing was moved."""
    return work.flops / work.bytes_moved if work.bytes_moved > 0 else None


def position(work: Work, seconds: float, roof: Roof) -> RooflinePosition | None:
    """The position of work that took `seconds`; None without time or work."""
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
    """What bounds the work; None if it moved nothing.

    Below the ridge a larger batch would help. With a full KV cache no more requests can run, so
    memory capacity is the bound and not bandwidth.
    """
    found = intensity(work)
    if found is None:
        return None
    if found >= roof.ridge:
        return Bound.COMPUTE
    return Bound.CAPACITY if cache_full else Bound.BANDWIDTH
