"""What the engines' machines told last, for the metrics page."""

import threading
from collections.abc import Iterable, Iterator, Mapping

from agent.analysis.cpu import CpuTime
from agent.catalog.host_facts import CPU, HOST_FACTS, MEMORY_LIMIT, MEMORY_USAGE, OOM_KILLS
from agent.catalog.metric import Metric
from agent.outputs.prometheus.families import Family, family_of
from agent.records.host import HostSighting

Values = Mapping[tuple[str, ...], float]


class HostBoard:
    """Holds the newest sighting of each engine; safe to use from several threads."""

    def __init__(self) -> None:
        self._cpu: dict[str, CpuTime] = {}
        self._sightings: dict[str, HostSighting] = {}
        self._lock = threading.Lock()

    def sighting(self, engine: str, seen: HostSighting) -> None:
        """Show this look at an engine's machine from now on."""
        with self._lock:
            self._sightings[engine] = seen
            if seen.processes is not None:
                before = self._cpu.get(engine, CpuTime())
                self._cpu[engine] = before.after(seen.processes)

    def families(self) -> Iterator[Family]:
        """Every fact that was seen of an engine."""
        with self._lock:
            values = self._values()
        for fact in HOST_FACTS:
            if values[fact]:
                yield family_of(fact, fact.labels, values[fact].items())

    def _values(self) -> Mapping[Metric, Values]:
        cgroups = {engine: seen.cgroup for engine, seen in self._sightings.items() if seen.cgroup}
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
