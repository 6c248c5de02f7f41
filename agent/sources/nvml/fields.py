"""Most of what a GPU tells, in one call: NVML's field values.

Numbers and units of the fields are those of nvml.h (13.615): energy in mJ, power in mW, throttled
time in ns, NVLink traffic in KiB up to NVLink 4 and in bytes from NVLink 5 on.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from agent.catalog import gpu_facts as f
from agent.catalog.metric import Metric
from agent.sources.nvml.calls import GpuCalls
from agent.sources.nvml.field_numbers import field_number

Key = tuple[str, tuple[str, ...]]

_FUNCTION = "nvmlDeviceGetFieldValues"
_VERSION = "nvmlSystemGetDriverVersion"
# NVLink fields tell the sum over all links when asked for this link.
_ALL_LINKS = 0xFFFFFFFF
# The slots of nvmlValue_t in the order of nvmlValueType_t.
_SLOTS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
# NVML_VALUE_NOT_AVAILABLE of each width.
_NOT_AVAILABLE = (2**32 - 1, 2**64 - 1)


@dataclass(frozen=True, slots=True)
class Field:
    """One of NVML's fields, the fact that it tells, and the factor to the fact's unit."""

    nvml: str
    key: Key
    scale: float = 1.0
    scope: int = 0


def _field(nvml: str, fact: Metric, *labels: str, scale: float = 1.0, scope: int = 0) -> Field:
    return Field(f"NVML_FI_DEV_{nvml}", (fact.name, labels), scale, scope)


# Of several fields that tell one fact, the first that is answered is kept. One that fails keeps
# those after it waiting: they count differently, and a change between them would look like a leap.
# So many polls long, for there are drivers that never answer it.
_WAITED_FOR_POLLS = 10
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
    """The fields that one GPU answers, read at once."""

    def __init__(self, calls: GpuCalls, handle: Any) -> None:
        self._calls = calls
        self._handle = handle
        self._failed: Counter[Field] = Counter()
        self._numbers: dict[Field, int] = {}
        self._keep(())
        self._number()

    def _number(self) -> None:
        """Ask for the fields too that this driver's version gives a number to."""
        driver = self._calls.ask(_VERSION)
        self._numbered = driver is not None or not self._calls.in_doubt(_VERSION)
        new = {
            field: number
            for field in FIELDS
            if field not in self._numbers
            and (number := field_number(field.nvml, self._calls.nvml.binding, driver)) is not None
        }
        self._numbers |= new
        self._keep((*self._fields, *new))

    def _keep(self, fields: tuple[Field, ...]) -> None:
        self._fields = fields
        # Pairs throughout: the binding takes a bare number by way of an exception.
        self._asked = [(self._numbers[field], field.scope) for field in fields]

    def add_to(self, facts: dict[Key, float], _at: float) -> None:
        """Put in what the fields tell now. Raises GpuLost and NvmlUnavailable."""
        if not self._numbered:
            self._number()
        if not self._fields:
            return
        values = self._calls.ask(_FUNCTION, self._handle, self._asked)
        if values is None:
            return
        told_by: dict[Key, Field | None] = {}
        useful = [
            field
            for field, value in zip(self._fields, values, strict=True)
            if self._is_useful(field, value, facts, told_by)
        ]
        kept = tuple(field for field in useful if told_by.get(field.key) in (None, field))
        if kept != self._fields:
            self._keep(kept)

    def _is_useful(
        self, field: Field, value: Any, facts: dict[Key, float], told_by: dict[Key, Field | None]
    ) -> bool:
        """Put one field in, unless another goes before it; whether to ask it again."""
        if value.nvmlReturn:
            if self._calls.entry_is_off(_FUNCTION, field.nvml, value.nvmlReturn):
                return False
            told_by.setdefault(field.key, None)
            return not self._makes_way(field)
        if value.valueType >= len(_SLOTS):
            return False
        number = getattr(value.value, _SLOTS[value.valueType])
        if field.key not in told_by and number not in _NOT_AVAILABLE:
            facts[field.key] = number * field.scale
            told_by[field.key] = field
        return True

    def _makes_way(self, field: Field) -> bool:
        """Count a poll in which a field failed; whether another that tells its fact has waited."""
        self._failed[field] += 1
        after = self._fields[self._fields.index(field) + 1 :]
        is_waited_for = any(other.key == field.key for other in after)
        return is_waited_for and self._failed[field] >= _WAITED_FOR_POLLS
