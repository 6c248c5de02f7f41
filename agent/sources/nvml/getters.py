"""Facts that have an NVML call of their own, and the processes on a GPU."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from agent.catalog import gpu_facts as f
from agent.catalog.metric import Metric
from agent.records.gpu import FactKey, ProcessMemory
from agent.sources.nvml.calls import GpuCalls


class Part(Protocol):
    """Adds some facts of one GPU to a sample; `at` is a monotonic time."""

    def add_to(self, facts: dict[FactKey, float], at: float) -> None:
        """Add the facts of now. Raises GpuLost and NvmlUnavailable."""


@dataclass(frozen=True, slots=True)
class Getter:
    """One call, with constants of the binding as arguments; `read` gives the facts' values."""

    function: str
    gives: tuple[FactKey, ...]
    read: Callable[[Any], Iterable[float]]
    constants: tuple[str, ...] = ()


def _key(fact: Metric, *labels: str) -> FactKey:
    return fact.name, labels


def _times(factor: float) -> Callable[[Any], Iterable[float]]:
    return lambda value: (value * factor,)


# Of several calls that give one fact, the first that returns is enough.
MEMORY = (
    Getter(
        "nvmlDeviceGetMemoryInfo",
        tuple(map(_key, (f.MEMORY_TOTAL, f.MEMORY_RESERVED, f.MEMORY_FREE, f.MEMORY_USED))),
        lambda memory: (memory.total, memory.reserved, memory.free, memory.used),
        ("nvmlMemory_v2",),
    ),
    # The first version of the call counts the driver's reserve as used: `used` is left out.
    Getter(
        "nvmlDeviceGetMemoryInfo",
        (_key(f.MEMORY_TOTAL), _key(f.MEMORY_FREE)),
        lambda memory: (memory.total, memory.free),
    ),
)
OFTEN = (
    *MEMORY,
    Getter(
        "nvmlDeviceGetUtilizationRates",
        (_key(f.UTILIZATION), _key(f.MEMORY_BUSY)),
        lambda rates: (rates.gpu / 100, rates.memory / 100),
    ),
    Getter("nvmlDeviceGetClockInfo", (_key(f.CLOCK, "sm"),), _times(1e6), ("NVML_CLOCK_SM",)),
    Getter("nvmlDeviceGetClockInfo", (_key(f.CLOCK, "memory"),), _times(1e6), ("NVML_CLOCK_MEM",)),
    Getter(
        "nvmlDeviceGetTemperatureV",
        (_key(f.TEMPERATURE, "gpu"),),
        _times(1),
        ("NVML_TEMPERATURE_GPU",),
    ),
    # Leaves with CUDA 14.
    Getter(
        "nvmlDeviceGetTemperature",
        (_key(f.TEMPERATURE, "gpu"),),
        _times(1),
        ("NVML_TEMPERATURE_GPU",),
    ),
    Getter("nvmlDeviceGetPowerUsage", (_key(f.POWER),), _times(1e-3)),
    Getter("nvmlDeviceGetTotalEnergyConsumption", (_key(f.ENERGY),), _times(1e-3)),
)
CACHED = (
    Getter("nvmlDeviceGetPersistenceMode", (_key(f.PERSISTENCE),), _times(1)),
    Getter("nvmlDeviceGetEnforcedPowerLimit", (_key(f.POWER_LIMIT),), _times(1e-3)),
    Getter(
        "nvmlDeviceGetMaxClockInfo", (_key(f.CLOCK_MAX, "sm"),), _times(1e6), ("NVML_CLOCK_SM",)
    ),
    Getter(
        "nvmlDeviceGetMaxClockInfo",
        (_key(f.CLOCK_MAX, "memory"),),
        _times(1e6),
        ("NVML_CLOCK_MEM",),
    ),
)

# The newer name of each first; the older leaves with CUDA 14.
_SUPPORTED_REASONS = (
    "nvmlDeviceGetSupportedClocksEventReasons",
    "nvmlDeviceGetSupportedClocksThrottleReasons",
)
_CURRENT_REASONS = (
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
)


class Getters:
    """Calls of one GPU, in order. A call is left out when its facts are known already."""

    def __init__(self, rows: Iterable[Getter], calls: GpuCalls, handle: Any) -> None:
        self._calls = calls
        self._handle = handle
        binding = calls.nvml.binding
        self._rows = [
            (row, [getattr(binding, name) for name in row.constants], "".join(row.constants))
            for row in rows
        ]

    def add_to(self, facts: dict[FactKey, float], _at: float) -> None:
        """Add the facts that the calls give now. Raises GpuLost and NvmlUnavailable."""
        for row, constants, variant in self._rows:
            if all(key in facts for key in row.gives):
                continue
            value = self._calls.ask(row.function, self._handle, *constants, variant=variant)
            if value is not None:
                facts.update(zip(row.gives, row.read(value), strict=True))


class Throttling:
    """The reasons that hold one GPU's clocks down now, of those that the GPU supports."""

    def __init__(self, calls: GpuCalls, handle: Any) -> None:
        self._calls = calls
        self._handle = handle
        supported = self._first_value(_SUPPORTED_REASONS)
        self._keys = [
            (bit, _key(f.THROTTLE_ACTIVE, reason))
            for bit, reason in f.THROTTLE_REASONS.items()
            if supported is None or supported & bit
        ]

    def add_to(self, facts: dict[FactKey, float], _at: float) -> None:
        """Add 1 for each reason in force and 0 for the others. Raises like every part."""
        reasons = self._first_value(_CURRENT_REASONS)
        if reasons is not None:
            facts.update((key, 1.0 if reasons & bit else 0.0) for bit, key in self._keys)

    def _first_value(self, names: Iterable[str]) -> int | None:
        values = (self._calls.ask(name, self._handle) for name in names)
        return next((value for value in values if value is not None), None)


class CachedPart:
    """A part that is read every `every_s`; in between its facts come from a cache."""

    def __init__(self, part: Part, every_s: float) -> None:
        self._part = part
        self._every_s = every_s
        self._due = -math.inf
        self._facts: dict[FactKey, float] = {}

    def add_to(self, facts: dict[FactKey, float], at: float) -> None:
        """Add the part's last facts."""
        if at >= self._due:
            self._facts.clear()
            self._part.add_to(self._facts, at)
            self._due = at + self._every_s
        facts.update(self._facts)


_COMPUTE = "nvmlDeviceGetComputeRunningProcesses_v3"
# Clients of the multi-process service are in a list of their own, if the service runs.
_MPS = "nvmlDeviceGetMPSComputeRunningProcesses_v3"


def process_memory(calls: GpuCalls, handle: Any) -> ProcessMemory | None:
    """Bytes by process, or None if some may be missing. Raises GpuLost and NvmlUnavailable.

    If the list of clients has never come, some may be missing all the same: a list that always
    fails must not hide the processes that are known.
    """
    compute, clients = calls.ask(_COMPUTE, handle), calls.ask(_MPS, handle)
    if compute is None:
        return None
    if clients is None and calls.in_doubt(_MPS) and (not compute or calls.ever_answered(_MPS)):
        return None
    used: dict[int, int | None] = {}
    for processes in (compute, clients):
        for pid, memory_bytes in _by_pid(processes or ()).items():
            used.setdefault(pid, memory_bytes)
    return used


def _by_pid(processes: Any) -> ProcessMemory:
    used: dict[int, int | None] = {}
    for process in processes:
        before = used.get(process.pid, 0)
        here = process.usedGpuMemory
        # One process may hold memory of several MIG instances.
        used[process.pid] = None if before is None or here is None else before + here
    return used
