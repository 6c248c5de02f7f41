"""CPU time of processes that come and go, as counters that never fall."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agent.records.host import EngineProcess, ProcessRole


@dataclass(frozen=True, slots=True)
class CpuTime:
    """CPU seconds by role, with what each process used before it was first sampled.

    `by_process` is what each living process, by its identity, had used at the last sample.
    """

    by_role: Mapping[ProcessRole, float] = field(default_factory=dict)
    by_process: Mapping[tuple[int, float], float] = field(default_factory=dict)

    def after(self, processes: Iterable[EngineProcess]) -> "CpuTime":
        """The sums after another sample. What a process used after its last sample is lost."""
        living = list(processes)
        by_role = dict(self.by_role)
        for process in living:
            used_s = process.cpu_s - self.by_process.get(process.identity, 0.0)
            by_role[process.role] = by_role.get(process.role, 0.0) + max(used_s, 0.0)
        return CpuTime(by_role, {process.identity: process.cpu_s for process in living})
