"""Most of a GPU's facts, read by one call: NVML's field values.

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

from collections import Counter
from dataclasses import dataclass
from typing import Any

from agent.catalog import gpu_facts as f
from agent.catalog.metric import Metric
from agent.records.gpu import FactKey
from agent.sources.nvml.calls import GpuCalls

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
