"""The parts of a GPU's sample: facts with a call of their own, field values, activity counters.

Numbers and units of the fields are those of nvml.h (13.615): energy in mJ, power in mW, throttled
time in ns, NVLink traffic in KiB up to NVLink 4 and in bytes from NVLink 5 on.

Most fields have had one number since they came, and the binding knows it. The times for which heat
and the power brake held the clocks down were renumbered. The bindings that NVIDIA publishes with
its drivers (nvidia-ml-py) number them

    12.570.172 and older            not at all
    12.575.51, 13.580.65            251 to 253
    13.580.82 up to 13.615.71       269 to 271

and a trace of the nvidia-smi of driver 580.65.06 has 251 to 253 (NVIDIA/k8s-test-infra, mock NVML).
The other driver uses the same numbers for power smoothing. For a driver between 580.65 and 580.82
the numbers are in doubt, so these fields are not read.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from agent.catalog import gpu_facts as f
from agent.catalog.metric import Metric
from agent.records.gpu import FactKey, ProcessMemory
from agent.sources.nvml.library import GpuCalls


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


_FUNCTION = "nvmlDeviceGetFieldValues"
_VERSION = "nvmlSystemGetDriverVersion"
# The scope with which NVLink fields give the sum over all links.
_ALL_LINKS = 0xFFFFFFFF
# The slots of nvmlValue_t in the order of nvmlValueType_t.
_SLOTS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
# NVML_VALUE_NOT_AVAILABLE of each width.
_NOT_AVAILABLE = (2**32 - 1, 2**64 - 1)

_RENUMBERED = (
    "NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
    "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
    "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
)
# The number of the first of them by the first driver that uses it, the newest driver first.
_FIRST_NUMBERS: tuple[tuple[tuple[int, ...], int | None], ...] = (
    ((580, 82), 269),
    ((580, 66), None),
    ((575, 51), 251),
)


@dataclass(frozen=True, slots=True)
class Field:
    """One of NVML's fields, the fact that it gives, and the factor to the fact's unit."""

    nvml: str
    key: FactKey
    scale: float = 1.0
    scope: int = 0


def _field(nvml: str, fact: Metric, *labels: str, scale: float = 1.0, scope: int = 0) -> Field:
    return Field(f"NVML_FI_DEV_{nvml}", (fact.name, labels), scale, scope)


# Of several fields that give one fact, the first that has a value is kept. A field that fails
# blocks the later ones for this many reads: they count differently, and a switch between two fields
# would look like a jump. Not for ever, because some drivers never give a value for the first.
_BLOCKED_READS = 10
FIELDS = (
    _field("POWER_AVERAGE", f.POWER, scale=1e-3),
    _field("POWER_INSTANT", f.POWER_INSTANT, scale=1e-3),
    _field("TOTAL_ENERGY_CONSUMPTION", f.ENERGY, scale=1e-3),
    _field("MEMORY_TEMP", f.TEMPERATURE, "memory"),
    _field("CLOCKS_EVENT_REASON_SW_POWER_CAP", f.THROTTLED_TIME, "sw_power_cap", scale=1e-9),
    _field("CLOCKS_EVENT_REASON_SYNC_BOOST", f.THROTTLED_TIME, "sync_boost", scale=1e-9),
    _field("CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN", f.THROTTLED_TIME, "sw_thermal", scale=1e-9),
    _field("CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN", f.THROTTLED_TIME, "hw_thermal", scale=1e-9),
    _field(
        "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
        f.THROTTLED_TIME,
        "hw_power_brake",
        scale=1e-9,
    ),
    _field("ECC_CURRENT", f.ECC_ENABLED),
    _field("ECC_SBE_VOL_TOTAL", f.ECC_ERRORS, "corrected", "driver_load"),
    _field("ECC_DBE_VOL_TOTAL", f.ECC_ERRORS, "uncorrected", "driver_load"),
    _field("ECC_SBE_AGG_TOTAL", f.ECC_ERRORS, "corrected", "lifetime"),
    _field("ECC_DBE_AGG_TOTAL", f.ECC_ERRORS, "uncorrected", "lifetime"),
    _field("REMAPPED_COR", f.REMAPPED_ROWS, "corrected"),
    _field("REMAPPED_UNC", f.REMAPPED_ROWS, "uncorrected"),
    _field("REMAPPED_PENDING", f.ROW_REMAP_PENDING),
    _field("REMAPPED_FAILURE", f.ROW_REMAP_FAILED),
    _field("RETIRED_SBE", f.RETIRED_PAGES, "corrected"),
    _field("RETIRED_DBE", f.RETIRED_PAGES, "uncorrected"),
    _field("RETIRED_PENDING", f.PAGE_RETIREMENT_PENDING),
    _field("GET_GPU_RECOVERY_ACTION", f.RECOVERY_ACTION),
    _field("PCIE_REPLAY_COUNTER", f.PCIE_REPLAYS),
    _field("PCIE_COUNT_TX_BYTES", f.PCIE_TRANSMITTED),
    _field("PCIE_COUNT_RX_BYTES", f.PCIE_RECEIVED),
    _field("NVLINK_COUNT_XMIT_BYTES", f.NVLINK_TRANSMITTED, scope=_ALL_LINKS),
    _field("NVLINK_COUNT_RCV_BYTES", f.NVLINK_RECEIVED, scope=_ALL_LINKS),
    _field("NVLINK_THROUGHPUT_DATA_TX", f.NVLINK_TRANSMITTED, scale=1024, scope=_ALL_LINKS),
    _field("NVLINK_THROUGHPUT_DATA_RX", f.NVLINK_RECEIVED, scale=1024, scope=_ALL_LINKS),
    # NVLink 5 and newer.
    *(
        _field(f"NVLINK_COUNT_{name}", f.NVLINK_ERRORS, error, scope=_ALL_LINKS)
        for name, error in (
            ("LINK_RECOVERY_EVENTS", "recovery"),
            ("LINK_RECOVERY_FAILED_EVENTS", "recovery_failed"),
            ("MALFORMED_PACKET_ERRORS", "malformed_packet"),
            ("BUFFER_OVERRUN_ERRORS", "buffer_overrun"),
            ("LOCAL_LINK_INTEGRITY_ERRORS", "link_integrity"),
        )
    ),
    # Up to NVLink 4.
    _field("NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", f.NVLINK_ERRORS, "crc_flit"),
    _field("NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", f.NVLINK_ERRORS, "crc_data"),
    _field("NVLINK_REPLAY_ERROR_COUNT_TOTAL", f.NVLINK_ERRORS, "replay"),
    _field("NVLINK_RECOVERY_ERROR_COUNT_TOTAL", f.NVLINK_ERRORS, "recovery"),
)


class FieldBatch:
    """The fields that one GPU has, read by one call."""

    def __init__(self, calls: GpuCalls, handle: Any) -> None:
        self._calls = calls
        self._handle = handle
        self._failed: Counter[Field] = Counter()
        self._numbers: dict[Field, int] = {}
        self._keep(())
        self._number()

    def _number(self) -> None:
        """Add the fields that have a number under this driver's version."""
        driver = self._calls.ask(_VERSION)
        self._numbered = driver is not None or not self._calls.in_doubt(_VERSION)
        new = {
            field: number
            for field in FIELDS
            if field not in self._numbers
            and (number := _field_number(field.nvml, self._calls.nvml.binding, driver)) is not None
        }
        self._numbers |= new
        self._keep((*self._fields, *new))

    def _keep(self, fields: tuple[Field, ...]) -> None:
        self._fields = fields
        # Always pairs: for a bare number the binding raises and catches an exception.
        self._pairs = [(self._numbers[field], field.scope) for field in fields]

    def add_to(self, facts: dict[FactKey, float], _at: float) -> None:
        """Add the facts that the fields give now. Raises GpuLost and NvmlUnavailable."""
        if not self._numbered:
            self._number()
        if not self._fields:
            return
        values = self._calls.ask(_FUNCTION, self._handle, self._pairs)
        if values is None:
            return
        given_by: dict[FactKey, Field | None] = {}
        useful = [
            field
            for field, value in zip(self._fields, values, strict=True)
            if self._is_useful(field, value, facts, given_by)
        ]
        kept = tuple(field for field in useful if given_by.get(field.key) in (None, field))
        if kept != self._fields:
            self._keep(kept)

    def _is_useful(
        self,
        field: Field,
        value: Any,
        facts: dict[FactKey, float],
        given_by: dict[FactKey, Field | None],
    ) -> bool:
        """Add a field's fact unless an earlier field gave it; return whether to read it again."""
        if value.nvmlReturn:
            if self._calls.entry_is_off(_FUNCTION, field.nvml, value.nvmlReturn):
                return False
            given_by.setdefault(field.key, None)
            return not self._blocked_enough(field)
        if value.valueType >= len(_SLOTS):
            return False
        number = getattr(value.value, _SLOTS[value.valueType])
        if field.key not in given_by and number not in _NOT_AVAILABLE:
            facts[field.key] = number * field.scale
            given_by[field.key] = field
        return True

    def _blocked_enough(self, field: Field) -> bool:
        """Count a failed read; return whether a later field may give the fact now."""
        self._failed[field] += 1
        later = self._fields[self._fields.index(field) + 1 :]
        blocks = any(other.key == field.key for other in later)
        return blocks and self._failed[field] >= _BLOCKED_READS


def _field_number(name: str, binding: Any, driver: str | None) -> int | None:
    """The number of a field for a driver of this version, None if that is in doubt.

    Raises AttributeError for a name that the binding does not know.
    """
    number: int = getattr(binding, name)
    if name not in _RENUMBERED:
        return number
    version = _version_parts(driver)
    first = next((number for since, number in _FIRST_NUMBERS if version >= since), None)
    return None if first is None else first + _RENUMBERED.index(name)


def _version_parts(driver: str | None) -> tuple[int, ...]:
    parts = (driver or "").split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


# All are percentages.
ACTIVITIES: tuple[tuple[str, Metric], ...] = (
    ("NVML_GPM_METRIC_GRAPHICS_UTIL", f.GRAPHICS_ACTIVE),
    ("NVML_GPM_METRIC_SM_UTIL", f.SM_ACTIVE),
    ("NVML_GPM_METRIC_SM_OCCUPANCY", f.SM_OCCUPANCY),
    ("NVML_GPM_METRIC_ANY_TENSOR_UTIL", f.TENSOR_ACTIVE),
    ("NVML_GPM_METRIC_DRAM_BW_UTIL", f.DRAM_ACTIVE),
)

# nvml.h: two samples must lie more than 100 ms apart.
_SHORTEST_S = 0.1
# A mean over a longer interval would hide the present, as after reads that failed. If reads are
# rarer than that, an interval of twice the usual length is still published.
_LONGEST_S = 60.0


class ActivityCounters:
    """Means between two samples of one device, which may be a MIG instance."""

    def __init__(self, calls: GpuCalls, handle: Any) -> None:
        """Allocate the two samples. Raises GpuLost and NvmlUnavailable."""
        self._calls = calls
        self._handle = handle
        self._names = ACTIVITIES
        self._samples: list[Any] = []
        self._taken_at: float | None = None
        self._usual_s = 0.0
        # The binding's own structure, because its size differs between versions.
        self._request = calls.nvml.binding.c_nvmlGpmMetricsGet_t()
        for _ in range(2):
            sample = calls.ask("nvmlGpmSampleAlloc")
            if sample is not None:
                self._samples.append(sample)

    def add_to(self, facts: dict[FactKey, float], at: float) -> None:
        """Add the means since the last read. Raises GpuLost and NvmlUnavailable."""
        if len(self._samples) < 2 or not self._names:
            return
        age_s = math.inf if self._taken_at is None else at - self._taken_at
        if age_s <= _SHORTEST_S:
            return
        older, newer = self._samples
        if self._calls.ask("nvmlGpmSampleGet", self._handle, newer) is None:
            return
        self._samples = [newer, older]
        longest_s = max(_LONGEST_S, 2 * self._usual_s)
        self._usual_s = 0.0 if self._taken_at is None else age_s
        self._taken_at = at
        if age_s <= longest_s:
            self._compare(older, newer, facts)

    def _compare(self, older: Any, newer: Any, facts: dict[FactKey, float]) -> None:
        means = self._calls.ask("nvmlGpmMetricsGet", self._filled_request(older, newer))
        if means is None:
            return
        off = []
        for row, metric in zip(self._names, means.metrics, strict=False):
            if metric.nvmlReturn:
                if self._calls.entry_is_off("nvmlGpmMetricsGet", row[0], metric.nvmlReturn):
                    off.append(row)
            elif math.isfinite(metric.value):
                facts[row[1].name, ()] = metric.value / 100
        if off:
            self._names = tuple(row for row in self._names if row not in off)

    def _filled_request(self, older: Any, newer: Any) -> Any:
        binding, request = self._calls.nvml.binding, self._request
        request.version = binding.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(self._names)
        request.sample1, request.sample2 = older, newer
        for index, (name, _) in enumerate(self._names):
            request.metrics[index].metricId = getattr(binding, name)
        return request

    def close(self) -> None:
        """Free the samples. Raises GpuLost and NvmlUnavailable."""
        while self._samples:
            self._calls.done("nvmlGpmSampleFree", self._samples.pop())


def has_activity(calls: GpuCalls, handle: Any) -> bool:
    """Whether the device has these counters. Raises GpuLost and NvmlUnavailable."""
    support = calls.ask("nvmlGpmQueryDeviceSupport", handle)
    return support is not None and bool(support.isSupportedDevice)
