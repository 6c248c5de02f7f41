"""The slices of a GPU that is divided by MIG."""

import logging
import math
from dataclasses import dataclass
from typing import Any

from agent.records.gpu import MigInstance, ProcessMemory
from agent.sources.nvml.calls import SLOW_S, GpuCalls, rest_s
from agent.sources.nvml.fields import Key
from agent.sources.nvml.getters import MEMORY, Getters
from agent.sources.nvml.gpm import Activity
from agent.sources.nvml.library import GpuLost
from agent.sources.nvml.processes import process_memory

_LOG = logging.getLogger(__name__)

_ENABLED = 1
_IDS = ("nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId")


@dataclass(frozen=True, slots=True)
class _Slice:
    """What tells one instance from another."""

    uuid: str
    gpu_instance: int | None
    compute_instance: int | None


class _Instance:
    """One instance with the calls that MIG answers: memory, activity and processes."""

    def __init__(self, told: _Slice, handle: Any, calls: GpuCalls, *, active: bool) -> None:
        self._told = told
        self._handle = handle
        self._calls = calls
        self._name: str | None = None
        self._attributes: Any = None
        self._memory = Getters(MEMORY, calls, handle)
        self._activity = Activity(calls, handle) if active else None
        self._processes: ProcessMemory | None = None

    def look_up(self) -> None:
        """Read what is told until the next time."""
        if self._name is None:
            self._name = self._calls.ask("nvmlDeviceGetName", self._handle)
        if self._attributes is None:
            self._attributes = self._calls.ask("nvmlDeviceGetAttributes_v2", self._handle)
        self._processes = process_memory(self._calls, self._handle)

    def read(self, at: float) -> MigInstance:
        """The instance now."""
        facts: dict[Key, float] = {}
        self._memory.add_to(facts, at)
        if self._activity is not None:
            self._activity.add_to(facts, at)
        return MigInstance(
            uuid=self._told.uuid,
            name=self._name or "",
            gpu_instance=self._told.gpu_instance,
            compute_instance=self._told.compute_instance,
            gpu_slices=self._attributes.gpuInstanceSliceCount if self._attributes else None,
            facts=facts,
            processes=self._processes,
        )

    def close(self) -> None:
        """Give back what NVML holds for this instance."""
        if self._activity is not None:
            self._activity.close()


class MigInstances:
    """The instances of one GPU, looked up anew every `every_s`, since they come and go."""

    def __init__(self, calls: GpuCalls, handle: Any, *, active: bool, every_s: float) -> None:
        self._calls = calls
        self._handle = handle
        self._active = active
        self._every_s = every_s
        self._due = -math.inf
        self._instances: dict[_Slice, _Instance] = {}
        # How many answers about instances the last look missed.
        self._doubts = 0
        # Where the next look begins: after the place that was slow in the last.
        self._place = 0

    def read(self, at: float) -> tuple[MigInstance, ...]:
        """Each instance that can be seen. Raises GpuLost and NvmlUnavailable."""
        anew = at >= self._due
        if anew:
            self._due = at + self._every_s
            self._look_up(at)
        read = []
        for told, instance in list(self._instances.items()):
            try:
                if anew:
                    instance.look_up()
                read.append(instance.read(at))
            except GpuLost as lost:
                # The whole GPU answered just before: this slice was taken away.
                _LOG.info("MIG instance %s is gone: %s", told.uuid, lost)
                self._instances.pop(told).close()
        return tuple(read)

    def _look_up(self, at: float) -> None:
        self._doubts = 0
        found = self._found(at)
        # Without a word about an instance it stays; one that is gone says so when it is read.
        gone = [told for told in self._instances if told not in found and not self._doubts]
        for told in gone:
            self._instances.pop(told).close()
        for told, handle in found.items():
            if told not in self._instances:
                calls = GpuCalls(self._calls.nvml, told.uuid)
                self._instances[told] = _Instance(told, handle, calls, active=self._active)

    def _found(self, at: float) -> dict[_Slice, Any]:
        mode = self._ask("nvmlDeviceGetMigMode", self._handle)
        if mode is None or mode[0] != _ENABLED:
            return {}
        most = self._ask("nvmlDeviceGetMaxMigDeviceCount", self._handle) or 0
        found: dict[_Slice, Any] = {}
        first, self._place = self._place, 0
        for place in range(first, most):
            told, took_s = self._timed(place)
            found.update(told)
            if took_s > SLOW_S and place + 1 < most:
                # One slow answer a look: together they would hold up all GPUs.
                self._place = place + 1
                self._due = min(self._due, at + rest_s(took_s))
                break
        # A part of the places says nothing of the others.
        self._doubts += first + self._place
        return found

    def _timed(self, place: int) -> tuple[dict[_Slice, Any], float]:
        """What a place tells, and the seconds that it took."""
        began = self._calls.nvml.monotonic()
        told = self._at(place)
        return dict([told] if told else []), self._calls.nvml.monotonic() - began

    def _at(self, place: int) -> tuple[_Slice, Any] | None:
        try:
            return self._told_at(place)
        except GpuLost:
            # Taken away just now; a loss of the whole GPU shows when that is read.
            self._doubts += 1
            return None

    def _told_at(self, place: int) -> tuple[_Slice, Any] | None:
        """The instance at a place with its handle, or None where there is none or it is unknown."""
        variant = f" {place}"
        at_place = (self._handle, place)
        handle = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", *at_place, variant=variant)
        uuid = None if handle is None else self._ask("nvmlDeviceGetUUID", handle, variant=variant)
        if uuid is None:
            return None
        before = self._doubts
        ids = [self._ask(name, handle, variant=variant) for name in _IDS]
        return (_Slice(uuid, *ids), handle) if self._doubts == before else None

    def _ask(self, function: str, *arguments: Any, variant: str = "") -> Any | None:
        answer = self._calls.ask(function, *arguments, variant=variant)
        self._doubts += answer is None and self._calls.in_doubt(function, variant)
        return answer

    def close(self) -> None:
        """Give back what NVML holds for the instances. Raises GpuLost and NvmlUnavailable."""
        while self._instances:
            self._instances.popitem()[1].close()
