"""One GPU of a session, and all parts of its sample."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agent.catalog.gpu_facts import UP
from agent.catalog.gpu_problems import GPU_SILENT
from agent.records.gpu import FactKey, Facts, GpuSample, ProcessMemory
from agent.sources.nvml.calls import GpuCalls, Nvml
from agent.sources.nvml.fields import FieldBatch
from agent.sources.nvml.getters import (
    CACHED,
    OFTEN,
    CachedPart,
    Getters,
    Part,
    Throttling,
    process_memory,
)
from agent.sources.nvml.gpm import ActivityCounters, has_activity
from agent.sources.nvml.library import GpuLost
from agent.sources.nvml.mig import MigInstances

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
