"""Samples of GPUs and their MIG instances, and Xid errors of the driver."""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from agent.catalog.gpu_facts import UP

FactKey = tuple[str, tuple[str, ...]]
# Values by fact name and label values, the labels in the fact's own order.
Facts = Mapping[FactKey, float]
# Bytes of GPU memory by the host's process ids; None if the driver withholds the bytes.
ProcessMemory = Mapping[int, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MigInstance:
    """One MIG instance. `facts` has those facts of a GPU that apply to an instance.

    `gpu_slices` of the GPU's slices (seven on most GPUs) are the instance's share of computation.
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
    """One sample of one GPU. `gpu` is the UUID: an index may name another GPU after a reset.

    Facts that the GPU does not report are absent. `problem` is a short word when a GPU that was
    read before cannot be read; `facts` then hold `gpu_up` and the counts of Xid errors only.
    `pods` are the pods that have the GPU, as `namespace/pod`; None if that is not known.
    """

    gpu: str
    index: int
    name: str
    at: float
    facts: Facts
    processes: ProcessMemory | None = None
    mig_instances: tuple[MigInstance, ...] = field(default=())
    problem: str | None = None
    pods: frozenset[str] | None = None

    def fact(self, name: str, *labels: str) -> float | None:
        """The value of one fact, or None if the GPU did not report it."""
        return self.facts.get((name, labels))

    def pids(self) -> set[int]:
        """The processes on the GPU and its instances."""
        return {pid for processes in self._process_lists() for pid in processes or ()}

    def lists_all_processes(self) -> bool:
        """Whether no process list is missing; under MIG those of all instances are enough."""
        instances = [instance.processes for instance in self.mig_instances]
        return self.processes is not None or (bool(instances) and None not in instances)

    def _process_lists(self) -> Iterator[ProcessMemory | None]:
        yield self.processes
        yield from (instance.processes for instance in self.mig_instances)

    def has_uuid(self, uuid: str) -> bool:
        """Whether this is the UUID of the GPU or of one of its instances, in any case."""
        uuids = [self.gpu, *(instance.uuid for instance in self.mig_instances)]
        return uuid.lower() in [each.lower() for each in uuids]

    def unread(self, at: float, problem: str, counts: Facts | None = None) -> "GpuSample":
        """The sample of the same GPU at a Unix time at which it cannot be read.

        `counts` are the facts that are known without the GPU: its Xid errors so far.
        """
        return replace(
            self,
            at=at,
            facts={(UP.name, ()): 0.0, **(counts or {})},
            processes=None,
            mig_instances=(),
            problem=problem,
            pods=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class XidError:
    """An Xid error that the driver reported while the agent listened.

    `count` is how often this GPU had this Xid since the agent started, this time included. The
    instances are those of MIG, None if the error concerns the whole GPU.
    """

    gpu: str
    xid: int
    at: float
    count: int
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """How busy a GPU was at a stored sample, 0 to 1; None if it did not report that."""

    gpu: str
    index: int
    name: str
    agent: str
    at: float
    busy: float | None


@dataclass(frozen=True, slots=True)
class GpuSamples:
    """The result of one read of a GPU source.

    `samples` has one sample of each GPU that was ever read, `xids` the Xid errors since the last
    read, `failures` a short word for each failure to count. `problem` is a sentence if the source
    itself cannot be read.
    """

    samples: tuple[GpuSample, ...] = ()
    xids: tuple[XidError, ...] = ()
    failures: tuple[str, ...] = ()
    problem: str | None = None


# A broken GPU reports bursts; the oldest of a thousand errors adds nothing to the newest.
_MAX_OF_ONE_GPU = 1000


class WaitingXids:
    """Holds Xid errors until they are taken. A burst of one GPU drops no error of another.

    The owner holds a lock for each call.
    """

    def __init__(self) -> None:
        self._of_gpu: defaultdict[str, deque[XidError]] = defaultdict(
            lambda: deque(maxlen=_MAX_OF_ONE_GPU)
        )

    def add(self, error: XidError) -> None:
        """Hold an error; drops the oldest of its GPU when there are too many."""
        self._of_gpu[error.gpu].append(error)

    def take(self) -> tuple[XidError, ...]:
        """The errors since the last call, oldest first."""
        taken = [error for of_one in self._of_gpu.values() for error in of_one]
        self._of_gpu.clear()
        return tuple(sorted(taken, key=lambda error: error.at))
