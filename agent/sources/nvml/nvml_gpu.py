"""One GPU of a session: all parts of its sample, and its MIG instances."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agent.catalog.gpu_facts import UP
from agent.catalog.gpu_problems import GPU_SILENT
from agent.records.gpu import FactKey, Facts, GpuSample, MigInstance, ProcessMemory
from agent.sources.nvml.library import SLOW_S, GpuCalls, GpuLost, Nvml, rest_s
from agent.sources.nvml.sample_parts import (
    CACHED,
    MEMORY,
    OFTEN,
    ActivityCounters,
    CachedPart,
    FieldBatch,
    Getters,
    Part,
    Throttling,
    has_activity,
    process_memory,
)

_LOG = logging.getLogger(__name__)

_ENABLED = 1
_IDS = ("nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId")


@dataclass(frozen=True, slots=True)
class _InstanceId:
    uuid: str
    gpu_instance: int | None
    compute_instance: int | None


class _Instance:
    """One instance with the calls that MIG supports: memory, activity and processes."""

    def __init__(
        self, identity: _InstanceId, handle: Any, calls: GpuCalls, *, active: bool
    ) -> None:
        self._identity = identity
        self._handle = handle
        self._calls = calls
        self._name: str | None = None
        self._attributes: Any = None
        self._memory = Getters(MEMORY, calls, handle)
        self._activity = ActivityCounters(calls, handle) if active else None
        self._processes: ProcessMemory | None = None

    def look_up(self) -> None:
        """Read what rarely changes; it is repeated until the next call."""
        if self._name is None:
            self._name = self._calls.ask("nvmlDeviceGetName", self._handle)
        if self._attributes is None:
            self._attributes = self._calls.ask("nvmlDeviceGetAttributes_v2", self._handle)
        self._processes = process_memory(self._calls, self._handle)

    def read(self, at: float) -> MigInstance:
        """The instance with its facts of now."""
        facts: dict[FactKey, float] = {}
        self._memory.add_to(facts, at)
        if self._activity is not None:
            self._activity.add_to(facts, at)
        return MigInstance(
            uuid=self._identity.uuid,
            name=self._name or "",
            gpu_instance=self._identity.gpu_instance,
            compute_instance=self._identity.compute_instance,
            gpu_slices=self._attributes.gpuInstanceSliceCount if self._attributes else None,
            facts=facts,
            processes=self._processes,
        )

    def close(self) -> None:
        if self._activity is not None:
            self._activity.close()


class MigInstances:
    """The instances of one GPU. They come and go: every `every_s` they are looked up again."""

    def __init__(self, calls: GpuCalls, handle: Any, *, active: bool, every_s: float) -> None:
        self._calls = calls
        self._handle = handle
        self._active = active
        self._every_s = every_s
        self._due = -math.inf
        self._instances: dict[_InstanceId, _Instance] = {}
        # How many calls about instances failed in the last look-up.
        self._doubts = 0
        # Where the next look-up begins: after the index that was slow in the last.
        self._index = 0

    def read(self, at: float) -> tuple[MigInstance, ...]:
        """Each instance that can be read. Raises GpuLost and NvmlUnavailable."""
        is_due = at >= self._due
        if is_due:
            self._due = at + self._every_s
            self._look_up(at)
        read = []
        for identity, instance in list(self._instances.items()):
            try:
                if is_due:
                    instance.look_up()
                read.append(instance.read(at))
            except GpuLost as lost:
                # The whole GPU was read just before: only this instance was removed.
                _LOG.info("MIG instance %s is gone: %s", identity.uuid, lost)
                self._instances.pop(identity).close()
        return tuple(read)

    def _look_up(self, at: float) -> None:
        self._doubts = 0
        found = self._found(at)
        # After a failed call instances stay; the next read of one that is gone raises GpuLost.
        gone = [each for each in self._instances if each not in found and not self._doubts]
        for identity in gone:
            self._instances.pop(identity).close()
        for identity, handle in found.items():
            if identity not in self._instances:
                calls = GpuCalls(self._calls.nvml, identity.uuid)
                instance = _Instance(identity, handle, calls, active=self._active)
                self._instances[identity] = instance

    def _found(self, at: float) -> dict[_InstanceId, Any]:
        mode = self._ask("nvmlDeviceGetMigMode", self._handle)
        if mode is None or mode[0] != _ENABLED:
            return {}
        most = self._ask("nvmlDeviceGetMaxMigDeviceCount", self._handle) or 0
        found: dict[_InstanceId, Any] = {}
        first, self._index = self._index, 0
        for index in range(first, most):
            instance, took_s = self._timed(index)
            found.update(instance)
            if took_s > SLOW_S and index + 1 < most:
                # One slow call in each look-up: together they would delay all GPUs.
                self._index = index + 1
                self._due = min(self._due, at + rest_s(took_s))
                break
        # The slots that were left out are unknown.
        self._doubts += first + self._index
        return found

    def _timed(self, index: int) -> tuple[dict[_InstanceId, Any], float]:
        """The instance at an index, if there is one, and the seconds that the calls took."""
        began = self._calls.nvml.monotonic()
        found = self._at(index)
        return dict([found] if found else []), self._calls.nvml.monotonic() - began

    def _at(self, index: int) -> tuple[_InstanceId, Any] | None:
        try:
            return self._look_up_at(index)
        except GpuLost:
            # Removed just now; a loss of the whole GPU shows when the GPU is read.
            self._doubts += 1
            return None

    def _look_up_at(self, index: int) -> tuple[_InstanceId, Any] | None:
        """The instance at an index with its handle, or None if there is none or it is unknown."""
        variant = f" {index}"
        at_index = (self._handle, index)
        handle = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", *at_index, variant=variant)
        uuid = None if handle is None else self._ask("nvmlDeviceGetUUID", handle, variant=variant)
        if uuid is None:
            return None
        before = self._doubts
        ids = [self._ask(name, handle, variant=variant) for name in _IDS]
        return (_InstanceId(uuid, *ids), handle) if self._doubts == before else None

    def _ask(self, function: str, *arguments: Any, variant: str = "") -> Any | None:
        value = self._calls.ask(function, *arguments, variant=variant)
        self._doubts += value is None and self._calls.in_doubt(function, variant)
        return value

    def close(self) -> None:
        """Free what NVML holds for the instances. Raises GpuLost and NvmlUnavailable."""
        while self._instances:
            self._instances.popitem()[1].close()


# Process lists take milliseconds, and limits, maxima and MIG rarely change.
CACHED_S = 10.0


@dataclass(frozen=True, slots=True)
class Identity:
    """The names of a GPU."""

    uuid: str
    index: int
    name: str


class Gpu:
    """A GPU that could be opened when the library was initialised."""

    def __init__(
        self, nvml: Nvml, identity: Identity, handle: Any, xid_facts: Callable[[str], Facts]
    ) -> None:
        """Find out which calls the GPU supports. Raises GpuLost and NvmlUnavailable.

        `xid_facts` gives the counts of Xid errors of a GPU.
        """
        self.identity = identity
        self.handle = handle
        self.calls = GpuCalls(nvml, identity.uuid)
        self._xid_facts = xid_facts
        active = has_activity(self.calls, handle)
        self._activity = ActivityCounters(self.calls, handle) if active else None
        self._mig = MigInstances(self.calls, handle, active=active, every_s=CACHED_S)
        self._parts = self._all_parts()
        self._processes: ProcessMemory | None = None
        self._processes_due = -math.inf

    def _all_parts(self) -> tuple[Part, ...]:
        calls, handle = self.calls, self.handle
        # The batch first: facts that it gives need no call of their own.
        parts: list[Part] = [
            FieldBatch(calls, handle),
            Getters(OFTEN, calls, handle),
            Throttling(calls, handle),
            CachedPart(Getters(CACHED, calls, handle), CACHED_S),
        ]
        return (*parts, self._activity) if self._activity else tuple(parts)

    def read(self, now: float) -> GpuSample:
        """One sample; `now` is Unix time. Raises GpuLost and NvmlUnavailable."""
        at = self.calls.nvml.monotonic()
        self.calls.begin()
        facts: dict[FactKey, float] = {(UP.name, ()): 1.0}
        for part in self._parts:
            part.add_to(facts, at)
        if at >= self._processes_due:
            self._processes_due = at + CACHED_S
            self._processes = process_memory(self.calls, self.handle)
        if self.calls.silent:
            raise GpuLost(GPU_SILENT, f"GPU {self.identity.uuid}: every call fails")
        instances = self._mig.read(at)
        facts.update(self._xid_facts(self.identity.uuid))
        return GpuSample(
            gpu=self.identity.uuid,
            index=self.identity.index,
            name=self.identity.name,
            at=now,
            facts=facts,
            processes=self._processes,
            mig_instances=instances,
        )

    def close(self) -> None:
        """Free what NVML holds for this GPU. Raises GpuLost and NvmlUnavailable."""
        self._mig.close()
        if self._activity is not None:
            self._activity.close()
