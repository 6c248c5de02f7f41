"""What a GPU said at one moment, and a fault that its driver reported."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Facts = Mapping[tuple[str, tuple[str, ...]], float]
# Bytes of GPU memory by process id, as the host counts processes; None where the driver withholds
# the number.
ProcessMemory = Mapping[int, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MigInstance:
    """One slice of a GPU under MIG. `facts` has the keys of a GPU's facts, as far as they apply.

    `gpu_slices` of the GPU's slices (seven on most) are its share of computation.
    """

    uuid: str
    name: str
    gpu_instance: int | None
    compute_instance: int | None
    gpu_slices: int | None
    facts: Facts
    processes: ProcessMemory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One reading of one GPU. `gpu` is its UUID: an index may name another GPU after a reset.

    `facts` maps (fact name, label values in the fact's own order) to a number; what the GPU does
    not tell is absent. `problem` is a short word when the GPU, seen before, could not be read; then
    `facts` hold no reading, only that and the faults seen so far.
    """

    gpu: str
    index: int
    name: str
    at: float
    facts: Facts
    processes: ProcessMemory | None = None
    mig_instances: tuple[MigInstance, ...] = field(default=())
    problem: str | None = None

    def fact(self, name: str, *labels: str) -> float | None:
        """The value of one fact, or None where the GPU did not tell it."""
        return self.facts.get((name, labels))


@dataclass(frozen=True, slots=True, kw_only=True)
class XidSeen:
    """An Xid error that the driver reported while the agent listened.

    `count` is how often this GPU has had this Xid since the agent started, this time included. The
    instances are those of MIG, None where the error is the whole GPU's.
    """

    gpu: str
    xid: int
    at: float
    count: int
    gpu_instance: int | None = None
    compute_instance: int | None = None
