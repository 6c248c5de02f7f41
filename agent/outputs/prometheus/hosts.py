"""The gauges and counters of the machines that engines run on."""

import threading
from collections.abc import Iterable, Iterator, Mapping

from agent.analysis.cpu import CpuTime
from agent.catalog.host_facts import CPU, HOST_FACTS, MEMORY_LIMIT, MEMORY_USAGE, OOM_KILLS
from agent.catalog.metric import Metric
from agent.outputs.prometheus.families import Family, family_of
from agent.records.host import HostSample

Values = Mapping[tuple[str, ...], float]


class HostBoard:
    """Holds the newest host sample of each engine. Several threads may call it."""

    def __init__(self) -> None:
        self._cpu: dict[str, CpuTime] = {}
        self._samples: dict[str, HostSample] = {}
        self._lock = threading.Lock()

    def sample(self, engine: str, sample: HostSample) -> None:
        """Publish this sample of an engine's machine from now on."""
        with self._lock:
            self._samples[engine] = sample
            if sample.processes is not None:
                before = self._cpu.get(engine, CpuTime())
                self._cpu[engine] = before.after(sample.processes)

    def families(self) -> Iterator[Family]:
        """Every fact that is known of an engine's machine."""
        with self._lock:
            values = self._values()
        for fact in HOST_FACTS:
            if values[fact]:
                yield family_of(fact, fact.labels, values[fact].items())

    def _values(self) -> Mapping[Metric, Values]:
        cgroups = {name: sample.cgroup for name, sample in self._samples.items() if sample.cgroup}
        return {
            CPU: {
                (engine, role.value): seconds
                for engine, time in self._cpu.items()
                for role, seconds in time.by_role.items()
            },
            MEMORY_USAGE: _known((name, cgroup.usage_bytes) for name, cgroup in cgroups.items()),
            MEMORY_LIMIT: _known((name, cgroup.limit_bytes) for name, cgroup in cgroups.items()),
            OOM_KILLS: _known((name, cgroup.oom_kills) for name, cgroup in cgroups.items()),
        }


def _known(values: Iterable[tuple[str, int | None]]) -> Values:
    return {(engine,): float(value) for engine, value in values if value is not None}
