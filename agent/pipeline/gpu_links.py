"""Which GPUs are which engine's: by the settings, or by the engine's processes on them."""

import threading
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agent.catalog.gpu_facts import MEMORY_TOTAL, MEMORY_USED, RECOVERY_ACTION
from agent.catalog.gpu_problems import LOST
from agent.records.gpu import GpuSample, XidSeen

# Xids come in bursts from a broken GPU; those that nobody took tell nothing that newer ones do not.
_MAX_WAITING_XIDS = 1000
_NO_ENGINE: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusSeen:
    """What the GPUs of an engine told since it was last asked.

    `problems` are short words by UUID for GPUs that cannot be read now. `figures` is the memory of
    each GPU in bytes, by a name with its index, `recovery_actions` what drivers ask for, by UUID.
    """

    gpus: tuple[str, ...] = ()
    xids: tuple[XidSeen, ...] = ()
    problems: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    recovery_actions: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Held:
    """The GPUs that an engine's processes were last found on, and all its processes then."""

    gpus: frozenset[str] = frozenset()
    pids: frozenset[int] = frozenset()


class GpuLinks:
    """Takes what GPUs tell and gives each engine its part; safe to use from several threads.

    A link by processes holds until the engine has processes on other GPUs: a dead engine has none,
    and a lost GPU does not tell any. An index is that of the GPU which had it first, for those of
    others change when one is lost. A new GPU that takes the place of a lost one has its index until
    that one is read under it again.
    """

    def __init__(self, named: Mapping[str, Sequence[int | str]]) -> None:
        """`named` are the GPUs that the settings give to each engine, by index or UUID."""
        self._named = {engine: tuple(gpus) for engine, gpus in named.items()}
        self._held: dict[str, _Held] = {}
        self._first_with: dict[int, str] = {}
        # The index that each GPU left to a new one.
        self._left: dict[str, int] = {}
        self._shared: set[int] = set()
        # When each GPU was read first and last.
        self._first_read: dict[str, float] = {}
        self._last_read: dict[str, float] = {}
        self._samples: dict[str, GpuSample] = {}
        self._xids: defaultdict[str | None, deque[XidSeen]] = defaultdict(
            lambda: deque(maxlen=_MAX_WAITING_XIDS)
        )
        self._lock = threading.Lock()

    def sample(self, sample: GpuSample) -> None:
        """A GPU was read, or could not be."""
        with self._lock:
            if sample.problem is None:
                self._first_read.setdefault(sample.gpu, sample.at)
                self._last_read[sample.gpu] = sample.at
            self._settle_index(sample)
            self._samples[sample.gpu] = sample

    def count_as_before(self, before: Sequence[GpuSample]) -> None:
        """Some GPU of an earlier run is lost: each has the index that it had then.

        Where two had the same, one was lost in that run already, and indexes are the driver's own.
        """
        indexes = {sample.index: sample.gpu for sample in before}
        if len(indexes) == len(before):
            with self._lock:
                self._first_with = indexes

    def forget(self, gpu: str) -> None:
        """Nobody waits for a GPU any more, by its UUID."""
        with self._lock:
            self._samples.pop(gpu, None)
            self._unsettle(gpu)

    def xid(self, seen: XidSeen) -> None:
        """A GPU's driver reported an error."""
        with self._lock:
            engines = self._engines_on(seen.gpu)
            for engine in engines or [_NO_ENGINE]:
                self._xids[engine].append(seen)

    def take(self, engine: str, pids: Collection[int]) -> GpusSeen:
        """What an engine's GPUs told since the last time; `pids` are its living processes."""
        with self._lock:
            if not self._named[engine]:
                self._hold(engine, frozenset(pids))
            return self._told(engine, self._gpus_of(engine))

    def take_unclaimed(self) -> GpusSeen:
        """The same of the GPUs that are no engine's."""
        with self._lock:
            claimed = {gpu for engine in self._named for gpu in self._gpus_of(engine)}
            return self._told(_NO_ENGINE, self._samples.keys() - claimed)

    def missing(self) -> Mapping[str, Sequence[int | str]]:
        """The GPUs, by engine, that the settings name and that were never seen."""
        with self._lock:
            lost = {
                engine: [
                    gpu for gpu in named if not self._matching(gpu) and not self._is_shared(gpu)
                ]
                for engine, named in self._named.items()
            }
        return {engine: gpus for engine, gpus in lost.items() if gpus}

    def shared(self) -> Mapping[str, Sequence[int | str]]:
        """The indexes, by engine, that the settings name and that GPUs of several hosts have."""
        with self._lock:
            told = {
                engine: [gpu for gpu in named if self._is_shared(gpu)]
                for engine, named in self._named.items()
            }
        return {engine: indexes for engine, indexes in told.items() if indexes}

    def seen(self) -> Sequence[str]:
        """Every GPU that was seen, by index and UUID, for people."""
        with self._lock:
            samples = sorted(self._samples.values(), key=lambda sample: sample.index)
        return [f"{sample.gpu} (index {sample.index})" for sample in samples]

    def samples_of(self, engine: str) -> Sequence[GpuSample]:
        """The last reading of each GPU that is known to be the engine's."""
        with self._lock:
            gpus = sorted(self._gpus_of(engine))
            return [self._samples[gpu] for gpu in gpus if gpu in self._samples]

    def _told(self, engine: str | None, gpus: Iterable[str]) -> GpusSeen:
        samples = [self._samples[gpu] for gpu in sorted(gpus) if gpu in self._samples]
        xids = tuple(self._xids[engine])
        self._xids[engine].clear()
        return GpusSeen(
            gpus=tuple(sample.gpu for sample in samples),
            xids=xids,
            problems={sample.gpu: sample.problem for sample in samples if sample.problem},
            figures={name: value for sample in samples for name, value in _figures(sample)},
            recovery_actions={
                sample.gpu: action
                for sample in samples
                if (action := sample.fact(RECOVERY_ACTION.name)) is not None
            },
        )

    def _engines_on(self, gpu: str) -> list[str | None]:
        return [engine for engine in self._named if gpu in self._gpus_of(engine)]

    def _gpus_of(self, engine: str) -> frozenset[str]:
        if not self._named[engine]:
            return self._held.get(engine, _Held()).gpus
        return frozenset(gpu for named in self._named[engine] for gpu in self._matching(named))

    def _matching(self, named: int | str) -> list[str]:
        """The UUID of the GPU, or of the one whose instance this names."""
        if isinstance(named, int):
            first = self._first_with.get(named)
            return [] if first is None or self._is_shared(named) else [first]
        return [sample.gpu for sample in self._samples.values() if _is_named(sample, named)]

    def _unsettle(self, gpu: str) -> None:
        self._first_with = {at: first for at, first in self._first_with.items() if first != gpu}

    def _settle_index(self, sample: GpuSample) -> None:
        if sample.problem is None and self._left.get(sample.gpu) == sample.index:
            del self._left[sample.gpu]
            self._unsettle(sample.gpu)
            self._first_with[sample.index] = sample.gpu
        if sample.gpu in self._first_with.values():
            return
        first = self._first_with.setdefault(sample.index, sample.gpu)
        if first == sample.gpu:
            return
        if self._replaces(sample.gpu, first):
            self._first_with[sample.index] = sample.gpu
            self._left[first] = sample.index
        # One machine never shows two that work under one index: these are of several.
        elif _work_beside(self._samples.get(first), sample):
            self._shared.add(sample.index)

    def _replaces(self, gpu: str, first: str) -> bool:
        """Whether a GPU came after another was lost: those that moved up were there with it."""
        was = self._samples.get(first)
        if was is None or was.problem not in LOST:
            return False
        came, left = self._first_read.get(gpu), self._last_read.get(first)
        return came is not None and left is not None and came > left

    def _is_shared(self, named: int | str) -> bool:
        return named in self._shared

    def _hold(self, engine: str, pids: frozenset[int]) -> None:
        found = {sample.gpu for sample in self._samples.values() if pids & _pids(sample)}
        if not found:
            return
        held = self._held.get(engine, _Held())
        if held.pids & pids:
            # It goes on as it was, so on those that do not tell their processes now too.
            found |= {gpu for gpu in held.gpus if self._hides_processes(gpu)}
        self._held[engine] = _Held(frozenset(found), pids)

    def _hides_processes(self, gpu: str) -> bool:
        return gpu in self._samples and not _tells_all_pids(self._samples[gpu])


def _is_named(sample: GpuSample, uuid: str) -> bool:
    names = [sample.gpu, *(instance.uuid for instance in sample.mig_instances)]
    return uuid.lower() in [name.lower() for name in names]


def _work_beside(one: GpuSample | None, other: GpuSample) -> bool:
    """Whether two GPUs were read under the same index at the same moment."""
    if one is None or one.problem is not None or other.problem is not None:
        return False
    return (one.index, one.at) == (other.index, other.at)


def _pids(sample: GpuSample) -> set[int]:
    instances = [instance.processes for instance in sample.mig_instances]
    return {pid for processes in (sample.processes, *instances) for pid in processes or ()}


def _tells_all_pids(sample: GpuSample) -> bool:
    """Of a GPU that MIG divides its instances tell them where it does not itself."""
    instances = [instance.processes for instance in sample.mig_instances]
    return sample.processes is not None or (bool(instances) and None not in instances)


def _figures(sample: GpuSample) -> Iterable[tuple[str, float]]:
    for fact in (MEMORY_USED, MEMORY_TOTAL):
        value = sample.fact(fact.name)
        if value is not None:
            yield f"gpu_{sample.index}_{fact.name.removeprefix('gpu_')}", value
