"""The GPUs that the agent knows, and which engine owns each."""

import logging
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent.catalog.gpu_facts import (
    CLOCK,
    CLOCK_MAX,
    DRAM_ACTIVE,
    ENERGY,
    MEMORY_TOTAL,
    MEMORY_USED,
    RECOVERY_ACTION,
    TENSOR_ACTIVE,
    UTILIZATION,
)
from agent.catalog.gpu_problems import GPU_MISSING, NO_GPU, UNSEEN
from agent.records.gpu import GpuSample, GpuSamples, WaitingXids, XidError

_LOG = logging.getLogger(__name__)

HISTORY_S = 300.0
# The facts of the history: efficiency and energy need them.
_HISTORY_FACTS = frozenset(
    fact.name for fact in (CLOCK, CLOCK_MAX, DRAM_ACTIVE, ENERGY, TENSOR_ACTIVE, UTILIZATION)
)
_NO_ENGINE: str | None = None
_NOT_THERE = "not_there"
_INDEX_SHARED = "index_shared"
_UNRESOLVED = {
    _NOT_THERE: "engine %s: its GPU %r is not there; the GPUs that are there: %s",
    _INDEX_SHARED: "engine %s: GPUs of several hosts have the index %r; configure the UUID of one "
    "instead: %s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """What the GPUs of one engine reported since the last report.

    `problems` has a short word by UUID for each GPU that cannot be read now. `memory` is the used
    and total bytes of each GPU, by a name with its index. `recovery_actions` are the actions that
    drivers request, by UUID.
    """

    xids: tuple[XidError, ...] = ()
    problems: Mapping[str, str] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    recovery_actions: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Link:
    """The GPUs on which an engine's processes or its pod were last found, and its process ids."""

    gpus: frozenset[str] = frozenset()
    pids: frozenset[int] = frozenset()


class GpuInventory:
    """Knows every GPU, its newest samples, and the engines that own it. Safe on every thread.

    The job that reads GPUs calls `update`. Monitors of engines call `take`. An engine owns the GPUs
    of its settings. Each of these is resolved to a UUID once, when a source first shows it. An
    engine without configured GPUs owns those of its pod, or those that its processes are on. This
    link holds until the pod or the processes have other GPUs: a dead engine has none, and a lost
    GPU lists none.
    """

    def __init__(
        self, configured: Mapping[str, Sequence[int | str]], pods: Mapping[str, str] | None = None
    ) -> None:
        """`configured` are the GPUs of each engine in the settings, by index or UUID.

        `pods` are the pods of engines, as `namespace/pod`.
        """
        self._pods = pods or {}
        self._configured = {engine: tuple(gpus) for engine, gpus in configured.items()}
        self._newest: dict[str, GpuSample] = {}
        self._history: defaultdict[str, deque[GpuSample]] = defaultdict(deque)
        self._xids: defaultdict[str | None, WaitingXids] = defaultdict(WaitingXids)
        self._links: dict[str, _Link] = {}
        # The last sample of each GPU of an earlier run, and the GPUs that this run has read.
        self._remembered: dict[str, GpuSample] = {}
        self._read: set[str] = set()
        self._answered = False
        # Why the source sees no GPU, until it has read one.
        self._blind: str | None = None
        self._by_index: dict[int, str] = {}
        self._shared: set[int] = set()
        self._resolved: dict[int | str, str] = {}
        self._lock = threading.Lock()

    @property
    def answered(self) -> bool:
        """Whether the source has read a GPU, or found that there is none."""
        with self._lock:
            return self._answered

    def remember(self, samples: Iterable[GpuSample]) -> None:
        """Expect the GPUs of an earlier run, by the last good sample of each; call it first."""
        with self._lock:
            self._remembered = {sample.gpu: sample for sample in samples}

    def update(self, read: GpuSamples, now: float) -> list[str]:
        """Add a read of the source at a Unix time; returns the failures to count."""
        with self._lock:
            failures = list(read.failures)
            is_first = not self._answered
            for sample in read.samples:
                self._read.add(sample.gpu)
                self._add(sample)
            self._answered |= bool(read.samples) or NO_GPU in failures
            self._blind = next((word for word in failures if word in UNSEEN), self._blind)
            failures += self._add_remembered(now)
            if self._answered:
                self._count_indexes(read.samples, is_first=is_first)
                self._resolve()
                failures += self._check_settings() if is_first else []
            for xid in read.xids:
                self._add_xid(xid)
        return failures

    def _add(self, sample: GpuSample) -> None:
        self._newest[sample.gpu] = sample
        facts = {key: value for key, value in sample.facts.items() if key[0] in _HISTORY_FACTS}
        history = self._history[sample.gpu]
        # Drops samples from the future: the clock was set back after they were taken.
        while history and history[-1].at > sample.at:
            history.pop()
        history.append(replace(sample, facts=facts, processes=None, mig_instances=(), pods=None))
        while history[0].at < sample.at - HISTORY_S:
            history.popleft()

    def _add_remembered(self, now: float) -> list[str]:
        """Add a sample of each remembered GPU that was not read; returns the failures to count."""
        waiting = sorted(self._remembered.keys() - self._read)
        if self._read - self._remembered.keys():
            self._forget(waiting)
            return []
        problem = GPU_MISSING if self._answered else self._blind
        if problem is None or not waiting:
            return []
        for gpu in waiting:
            before, sample = self._newest.get(gpu), self._remembered[gpu].unread(now, problem)
            if self._answered and (before is None or before.problem != problem):
                _LOG.error("GPU %s (index %d) was there and is gone", gpu, sample.index)
            self._add(sample)
        return [GPU_MISSING] if self._answered else []

    def _forget(self, gpus: Iterable[str]) -> None:
        """Miss no GPU of the earlier run any more: the agent has other GPUs, or another machine."""
        self._remembered = {}
        for gpu in gpus:
            if self._newest.pop(gpu, None) is not None:
                _LOG.info("GPU %s is not missed any more: there are others", gpu)
            self._by_index = {at: uuid for at, uuid in self._by_index.items() if uuid != gpu}
            self._resolved = {item: uuid for item, uuid in self._resolved.items() if uuid != gpu}

    def _count_indexes(self, samples: Sequence[GpuSample], *, is_first: bool) -> None:
        """Give each index to the GPU that has it first; it keeps the index from then on."""
        good = [sample for sample in samples if sample.problem is None]
        counts = Counter(sample.index for sample in good)
        self._shared |= {index for index, count in counts.items() if count > 1}
        if is_first and self._remembered.keys() - self._read:
            # A driver renumbers the GPUs behind a lost one, so the earlier run's indexes apply.
            before = sorted(self._remembered.values(), key=lambda s: (s.at, s.gpu in self._read))
            self._by_index = {sample.index: sample.gpu for sample in before}
        for sample in good:
            is_free = sample.index not in self._by_index
            if is_free and sample.gpu not in self._by_index.values():
                self._by_index[sample.index] = sample.gpu

    def _resolve(self) -> None:
        for engine, items in self._configured.items():
            for item in items:
                uuid = self._resolved.get(item) or self._uuid_of(item)
                if uuid is not None and item not in self._resolved:
                    self._resolved[item] = uuid
                    _LOG.info("engine %s: GPU %s is %s", engine, item, uuid)

    def _uuid_of(self, item: int | str) -> str | None:
        if isinstance(item, int):
            return None if item in self._shared else self._by_index.get(item)
        return next((gpu for gpu, sample in self._newest.items() if sample.has_uuid(item)), None)

    def _check_settings(self) -> list[str]:
        """Log each configured GPU that is not there; returns the failures to count."""
        newest = sorted(self._newest.values(), key=lambda sample: sample.index)
        there = ", ".join(f"{sample.gpu} (index {sample.index})" for sample in newest)
        failures = []
        for engine, items in self._configured.items():
            for item in items:
                if item in self._resolved:
                    continue
                failures.append(_INDEX_SHARED if item in self._shared else _NOT_THERE)
                _LOG.error(_UNRESOLVED[failures[-1]], engine, item, there or "none")
        return failures

    def _add_xid(self, xid: XidError) -> None:
        _LOG.warning("GPU %s reports Xid %d, so far %d times", xid.gpu, xid.xid, xid.count)
        owners: list[str | None] = [
            engine for engine in self._configured if xid.gpu in self._gpus_of(engine)
        ]
        for engine in owners or [_NO_ENGINE]:
            self._xids[engine].add(xid)

    def take(self, engine: str, pids: Collection[int]) -> GpuReport:
        """What an engine's GPUs reported since the last call; `pids` are its living processes."""
        with self._lock:
            if not self._configured[engine]:
                self._link(engine, frozenset(pids))
            return self._report(engine, self._gpus_of(engine))

    def take_unclaimed(self) -> GpuReport:
        """The same for the GPUs that no engine owns.

        Until the source has read a GPU, owners are unknown, and the report has only Xids.
        """
        with self._lock:
            owned = {gpu for engine in self._configured for gpu in self._gpus_of(engine)}
            unclaimed = self._newest.keys() - owned if self._answered else ()
            return self._report(_NO_ENGINE, unclaimed)

    def samples_of(self, engine: str) -> Sequence[GpuSample]:
        """The newest sample of each GPU that the engine owns."""
        with self._lock:
            return self._samples(self._gpus_of(engine))

    def newest(self) -> Sequence[GpuSample]:
        """The newest sample of each GPU."""
        with self._lock:
            return list(self._newest.values())

    def history(self, gpus: Collection[str]) -> list[GpuSample]:
        """The samples of these GPUs of the last minutes, with the facts that efficiency needs."""
        with self._lock:
            return [sample for gpu in gpus for sample in self._history.get(gpu, ())]

    def _samples(self, gpus: Iterable[str]) -> list[GpuSample]:
        return [self._newest[gpu] for gpu in sorted(gpus) if gpu in self._newest]

    def _gpus_of(self, engine: str) -> frozenset[str]:
        items = self._configured[engine]
        if not items:
            return self._links.get(engine, _Link()).gpus
        return frozenset(self._resolved[item] for item in items if item in self._resolved)

    def _link(self, engine: str, pids: frozenset[int]) -> None:
        before = self._links.get(engine, _Link())
        found = self._of_pod(engine, before) or self._of_processes(pids, before)
        if found:
            self._links[engine] = _Link(found, pids)

    def _of_pod(self, engine: str, before: _Link) -> frozenset[str]:
        pod = self._pods.get(engine)
        found = {gpu for gpu, sample in self._newest.items() if pod in (sample.pods or ())}
        # A GPU that cannot be read now names no pods: it may be lost.
        kept = [sample.gpu for sample in self._samples(before.gpus) if sample.pods is None]
        return frozenset(found.union(kept) if found else ())

    def _of_processes(self, pids: frozenset[int], before: _Link) -> frozenset[str]:
        found = {gpu for gpu, sample in self._newest.items() if pids & sample.pids()}
        if found and before.pids & pids:
            # The same engine goes on. It keeps GPUs that list no processes now: they may be lost.
            kept = self._samples(before.gpus)
            found |= {sample.gpu for sample in kept if not sample.lists_all_processes()}
        return frozenset(found)

    def _report(self, engine: str | None, gpus: Iterable[str]) -> GpuReport:
        samples = self._samples(gpus)
        actions = {sample.gpu: sample.fact(RECOVERY_ACTION.name) for sample in samples}
        return GpuReport(
            xids=self._xids[engine].take(),
            problems={sample.gpu: sample.problem for sample in samples if sample.problem},
            memory={name: value for sample in samples for name, value in _memory(sample)},
            recovery_actions={gpu: wish for gpu, wish in actions.items() if wish is not None},
        )


def _memory(sample: GpuSample) -> Iterator[tuple[str, float]]:
    for fact in (MEMORY_USED, MEMORY_TOTAL):
        value = sample.fact(fact.name)
        if value is not None:
            yield f"gpu_{sample.index}_{fact.name.removeprefix('gpu_')}", value


def each_once(recent: Sequence[GpuSample], stored: Sequence[GpuSample]) -> list[GpuSample]:
    """All recent samples, and the stored ones that are not among them."""
    known = {_identity(sample) for sample in recent}
    return [*recent, *(sample for sample in stored if _identity(sample) not in known)]


def _identity(sample: GpuSample) -> tuple[str, int]:
    """The GPU and time of a sample; in 10 ms, because a database rounds times to microseconds."""
    return sample.gpu, round(sample.at * 100)
