"""One GPU: who it is, and everything that it is asked."""

import math
from dataclasses import dataclass
from typing import Any

from agent.catalog import gpu_facts as f
from agent.records.gpu import GpuSample, ProcessMemory
from agent.sources.nvml.calls import GpuCalls, Nvml
from agent.sources.nvml.fields import FieldBatch, Key
from agent.sources.nvml.getters import OFTEN, SELDOM, Getters, Part, Seldom, Throttling
from agent.sources.nvml.gpm import Activity, has_activity
from agent.sources.nvml.library import GpuLost
from agent.sources.nvml.mig import MigInstances
from agent.sources.nvml.processes import process_memory
from agent.sources.nvml.xid_tally import XidTally

# Lists of processes take milliseconds, and limits, maxima and MIG change seldom.
SELDOM_S = 10.0

_UP: Key = (f.UP.name, ())


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a GPU is."""

    uuid: str
    index: int
    name: str


class Gpu:
    """A GPU that answered when the library was initialised."""

    def __init__(self, nvml: Nvml, identity: Identity, handle: Any, tally: XidTally) -> None:
        """Find out what it can tell. Raises GpuLost and NvmlUnavailable."""
        self.identity = identity
        self.handle = handle
        self.calls = GpuCalls(nvml, identity.uuid)
        self._tally = tally
        self._activity = Activity(self.calls, handle) if self._is_active() else None
        self._mig = MigInstances(
            self.calls, handle, active=self._activity is not None, every_s=SELDOM_S
        )
        self._parts = self._all_parts()
        self._processes: ProcessMemory | None = None
        self._processes_due = -math.inf

    def _is_active(self) -> bool:
        return has_activity(self.calls, self.handle)

    def _all_parts(self) -> tuple[Part, ...]:
        calls, handle = self.calls, self.handle
        # The batch first: what it tells needs no call of its own.
        parts: list[Part] = [
            FieldBatch(calls, handle),
            Getters(OFTEN, calls, handle),
            Throttling(calls, handle),
            Seldom(Getters(SELDOM, calls, handle), SELDOM_S),
        ]
        return (*parts, self._activity) if self._activity else tuple(parts)

    def read(self, now: float) -> GpuSample:
        """The GPU now, in Unix time. Raises GpuLost and NvmlUnavailable."""
        at = self.calls.nvml.monotonic()
        self.calls.begin()
        facts: dict[Key, float] = {_UP: 1.0}
        for part in self._parts:
            part.add_to(facts, at)
        if at >= self._processes_due:
            self._processes_due = at + SELDOM_S
            self._processes = process_memory(self.calls, self.handle)
        if self.calls.silent:
            raise GpuLost("gpu_silent", f"GPU {self.identity.uuid}: every call fails")
        instances = self._mig.read(at)
        facts.update(self._tally.facts(self.identity.uuid))
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
        """Give back what NVML holds for this GPU. Raises GpuLost and NvmlUnavailable."""
        self._mig.close()
        if self._activity is not None:
            self._activity.close()
