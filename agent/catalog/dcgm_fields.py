"""The series of dcgm-exporter that give our GPU facts.

The exporter names a series as its operator's CSV names the field. Old and new names therefore occur
together, with any version. DCGM 4.7 added fields 1600 to 1650 in base units, and exporter 4.9
exports these by default: the unit is in the name. Sources of the rows:

names     dcgmlib/dcgm_fields.h of NVIDIA/DCGM 4.6.0 with its aliases for the older names;
          NVIDIA/go-dcgm: base_unit_fields_test.go (the names in hertz and joules) and
          legacy_fields.csv (the names of exporter 1.x, in small letters); NVIDIA's "Field
          Identifiers" of DCGM 4.7.0 (the names in bytes and the ratios)
units     etc/default-counters.csv of NVIDIA/dcgm-exporter, and dcgm_fields.h
meaning   dcgmlib/src/DcgmCacheManager.cpp and DcgmGpmManager.cpp: the calls of NVML behind a field

Left out, because the value may not mean the same as our fact:

DCGM_FI_DEV_GPU_UTIL_RATIO alone  a percentage in DCGM 4.6, a ratio beside a field of DCGM 4.7
DCGM_FI_DEV_FB_USED_RATIO       no fact of ours
DCGM_FI_PROF_PCIE_*_BYTES       a rate, our fact is a counter
DCGM_FI_PROF_PCIE_*_BYTES_TOTAL another counter than the one that our fact comes from
DCGM_FI_DEV_PCIE_*_THROUGHPUT   a rate or a count, in KB or KiB, by version; no longer supported
DCGM_FI_DEV_NVLINK_* of traffic KiB, MB or bytes by generation; both directions, or one link
DCGM_FI_PROF_NVLINK_*           a rate, with the overhead of the protocol
DCGM_FI_DEV_*_VIOLATION, *_THROTTLE_SECONDS_TOTAL   by other reasons than our fact
DCGM_EXP_*                      events or one pod's share; our facts are times, states, whole GPUs

An operator who knows the meaning of a series in one exporter can add it as another DcgmField.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from agent.catalog import gpu_facts as f
from agent.catalog.metric import Metric
from agent.errors import SettingsInvalid

# Set by the source itself, not by a series.
_OWN = {fact.name for fact in (f.UP, f.XID_ERRORS, f.XID_LAST_SEEN)}
_FACTS = {fact.name: fact for fact in f.GPU_FACTS if fact.name not in _OWN}
_SERIES = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmField:
    """One series, the fact that it gives, and the factor to the fact's unit.

    `labels` are the values of the fact's labels, in their order. With `bit` the series is a set of
    flags, and the fact is 1 if this flag is set. A series with `beside` is used only if the
    GPU has one of these series too. `only` is a label, and the values of it that count.
    `zero_means_off`: the value 0 is unknown, as of a card without this sensor. Raises
    SettingsInvalid, which names every invalid value.
    """

    series: str
    fact: str
    labels: tuple[str, ...] = ()
    scale: float = 1.0
    bit: int | None = None
    beside: tuple[str, ...] = ()
    only: tuple[str, tuple[str, ...]] | None = None
    zero_means_off: bool = False

    def __post_init__(self) -> None:
        if problems := tuple(_problems(self)):
            raise SettingsInvalid(problems)

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        """The fact with its labels, as samples hold it."""
        return self.fact, self.labels

    def read(self, value: float) -> float:
        """The fact's value, in the fact's unit, for a value of the series."""
        if self.bit is not None:
            return 1.0 if int(value) & self.bit else 0.0
        return value * self.scale


def _problems(field: DcgmField) -> Iterator[str]:
    if not _SERIES.fullmatch(field.series):
        yield f"dcgm field {field.series!r}: a series has a name of letters, digits, '_' and ':'"
    if not (math.isfinite(field.scale) and field.scale > 0):
        yield f"dcgm field {field.series!r}: the scale {field.scale!r} must be a number above 0"
    fact = _FACTS.get(field.fact)
    if fact is None:
        yield f"dcgm field {field.series!r}: there is no fact {field.fact!r}{_near(field.fact)}"
    elif len(field.labels) != len(fact.labels) or not all(field.labels):
        wanted = ", ".join(fact.labels) or "no label"
        yield (
            f"dcgm field {field.series!r}: the labels {list(field.labels)!r} do not fit the fact "
            f"{field.fact!r}, which has {wanted}"
        )


def _near(name: str) -> str:
    found = get_close_matches(name, _FACTS, n=1)
    return f"; is it {found[0]!r}?" if found else "; docs/gpus.md lists them"


def _fields(fact: Metric, series: str, *labels: str, **options: Any) -> Iterator[DcgmField]:
    """A field for each name in `series`, newest first."""
    for name in series.split():
        full = name if name.startswith("dcgm_") else f"DCGM_FI_{name}"
        yield DcgmField(series=full, fact=fact.name, labels=labels, **options)


def _reasons(series: str) -> Iterator[DcgmField]:
    for bit, reason in f.THROTTLE_REASONS.items():
        yield DcgmField(series=series, fact=f.THROTTLE_ACTIVE.name, labels=(reason,), bit=bit)


MIB = 1024.0 * 1024
MHZ = 1e6
_NS = 1e-9
PERCENT = 0.01
# Fields that DCGM has since 4.7, where GPU_UTIL_RATIO is a ratio.
_SINCE_4_7 = (
    "DCGM_FI_DEV_MEMORY_UTIL_RATIO",
    "DCGM_FI_DEV_FB_FREE_BYTES",
    "DCGM_FI_DEV_FB_USED_BYTES",
)

# Of several series that give one fact, the first that has a value is used.
DCGM_FIELDS: tuple[DcgmField, ...] = (
    # Memory, in bytes since DCGM 4.7, before in whole MiB
    *_fields(f.MEMORY_TOTAL, "DEV_FB_CAPACITY_BYTES"),
    *_fields(f.MEMORY_TOTAL, "DEV_FB_TOTAL", scale=MIB),
    *_fields(f.MEMORY_FREE, "DEV_FB_FREE_BYTES"),
    *_fields(f.MEMORY_FREE, "DEV_FB_FREE dcgm_fb_free", scale=MIB),
    *_fields(f.MEMORY_USED, "DEV_FB_USED_BYTES"),
    *_fields(f.MEMORY_USED, "DEV_FB_USED dcgm_fb_used", scale=MIB),
    *_fields(f.MEMORY_RESERVED, "DEV_FB_RESERVED_BYTES"),
    *_fields(f.MEMORY_RESERVED, "DEV_FB_RESERVED", scale=MIB),
    # Utilisation
    *_fields(f.UTILIZATION, "DEV_GPU_UTIL_RATIO", beside=_SINCE_4_7),
    *_fields(f.UTILIZATION, "DEV_GPU_UTIL dcgm_gpu_utilization", scale=PERCENT),
    *_fields(f.MEMORY_BUSY, "DEV_MEMORY_UTIL_RATIO"),
    *_fields(f.MEMORY_BUSY, "DEV_MEM_COPY_UTIL dcgm_mem_copy_utilization", scale=PERCENT),
    # Activity
    *_fields(
        f.GRAPHICS_ACTIVE,
        "PROF_GR_ENGINE_UTIL_RATIO PROF_GR_ENGINE_ACTIVE dcgm_fi_prof_gr_engine_active",
    ),
    *_fields(f.SM_ACTIVE, "PROF_SM_UTIL_RATIO PROF_SM_ACTIVE dcgm_fi_prof_sm_active"),
    *_fields(f.SM_OCCUPANCY, "PROF_SM_OCCUPANCY_RATIO PROF_SM_OCCUPANCY dcgm_fi_prof_sm_occupancy"),
    *_fields(
        f.TENSOR_ACTIVE,
        "PROF_TENSOR_UTIL_RATIO PROF_PIPE_TENSOR_ACTIVE dcgm_fi_prof_pipe_tensor_active",
    ),
    *_fields(f.DRAM_ACTIVE, "PROF_DRAM_UTIL_RATIO PROF_DRAM_ACTIVE dcgm_fi_prof_dram_active"),
    # Power and energy
    *_fields(f.POWER, "DEV_BOARD_POWER_WATTS DEV_POWER_USAGE dcgm_power_usage"),
    *_fields(f.POWER_INSTANT, "DEV_BOARD_POWER_RAW_WATTS DEV_POWER_USAGE_INSTANT"),
    # The second is the limit that was set for the board; the one in force is never above it.
    *_fields(f.POWER_LIMIT, "DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS DEV_ENFORCED_POWER_LIMIT"),
    *_fields(f.POWER_LIMIT, "DEV_BOARD_POWER_LIMIT_REQUESTED_WATTS DEV_POWER_MGMT_LIMIT"),
    *_fields(f.ENERGY, "DEV_GPU_ENERGY_JOULES_TOTAL"),
    *_fields(f.ENERGY, "DEV_TOTAL_ENERGY_CONSUMPTION dcgm_total_energy_consumption", scale=1e-3),
    *_fields(f.PERSISTENCE, "DEV_PERSISTENCE_MODE"),
    # Clocks and temperatures
    *_fields(f.CLOCK, "DEV_SM_CLOCK_HERTZ", "sm"),
    *_fields(f.CLOCK, "DEV_SM_CLOCK dcgm_sm_clock", "sm", scale=MHZ),
    *_fields(f.CLOCK, "DEV_MEMORY_CLOCK_HERTZ", "memory"),
    *_fields(f.CLOCK, "DEV_MEM_CLOCK dcgm_memory_clock", "memory", scale=MHZ),
    *_fields(f.CLOCK_MAX, "DEV_SM_MAX_CLOCK_HERTZ", "sm"),
    *_fields(f.CLOCK_MAX, "DEV_MAX_SM_CLOCK", "sm", scale=MHZ),
    *_fields(f.CLOCK_MAX, "DEV_MEMORY_MAX_CLOCK_HERTZ", "memory"),
    *_fields(f.CLOCK_MAX, "DEV_MAX_MEM_CLOCK", "memory", scale=MHZ),
    *_fields(f.TEMPERATURE, "DEV_GPU_TEMP_CELSIUS DEV_GPU_TEMP dcgm_gpu_temp", "gpu"),
    *_fields(
        f.TEMPERATURE,
        "DEV_MEMORY_TEMP_CELSIUS DEV_MEMORY_TEMP dcgm_memory_temp",
        "memory",
        zero_means_off=True,
    ),
    # Throttling
    *_reasons("DCGM_FI_DEV_CLOCKS_EVENT_REASONS"),
    *_reasons("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS"),
    *_fields(
        f.THROTTLED_TIME, "DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP_NS", "sw_power_cap", scale=_NS
    ),
    *_fields(f.THROTTLED_TIME, "DEV_CLOCKS_EVENT_REASON_SYNC_BOOST_NS", "sync_boost", scale=_NS),
    *_fields(
        f.THROTTLED_TIME, "DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS", "sw_thermal", scale=_NS
    ),
    *_fields(
        f.THROTTLED_TIME, "DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS", "hw_thermal", scale=_NS
    ),
    *_fields(
        f.THROTTLED_TIME,
        "DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS",
        "hw_power_brake",
        scale=_NS,
    ),
    # Memory errors
    *_fields(f.ECC_ENABLED, "DEV_ECC_MODE DEV_ECC_CURRENT"),
    *_fields(
        f.ECC_ERRORS,
        "DEV_ECC_SBE_VOL_TOTAL dcgm_ecc_sbe_volatile_total",
        "corrected",
        "driver_load",
    ),
    *_fields(
        f.ECC_ERRORS,
        "DEV_ECC_DBE_VOL_TOTAL dcgm_ecc_dbe_volatile_total",
        "uncorrected",
        "driver_load",
    ),
    *_fields(
        f.ECC_ERRORS, "DEV_ECC_SBE_AGG_TOTAL dcgm_ecc_sbe_aggregate_total", "corrected", "lifetime"
    ),
    *_fields(
        f.ECC_ERRORS,
        "DEV_ECC_DBE_AGG_TOTAL dcgm_ecc_dbe_aggregate_total",
        "uncorrected",
        "lifetime",
    ),
    *_fields(
        f.REMAPPED_ROWS,
        "DEV_ROW_REMAP_CORRECTABLE_TOTAL DEV_CORRECTABLE_REMAPPED_ROWS",
        "corrected",
    ),
    *_fields(
        f.REMAPPED_ROWS,
        "DEV_ROW_REMAP_UNCORRECTABLE_TOTAL DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "uncorrected",
    ),
    *_fields(f.ROW_REMAP_PENDING, "DEV_ROW_REMAP_PENDING"),
    *_fields(f.ROW_REMAP_FAILED, "DEV_ROW_REMAP_FAILED DEV_ROW_REMAP_FAILURE"),
    *_fields(
        f.RETIRED_PAGES,
        "DEV_PAGE_RETIRED_SBE_TOTAL DEV_RETIRED_SBE dcgm_retired_pages_sbe",
        "corrected",
    ),
    *_fields(
        f.RETIRED_PAGES,
        "DEV_PAGE_RETIRED_DBE_TOTAL DEV_RETIRED_DBE dcgm_retired_pages_dbe",
        "uncorrected",
    ),
    *_fields(
        f.PAGE_RETIREMENT_PENDING,
        "DEV_PAGE_RETIRED_PENDING DEV_RETIRED_PENDING dcgm_retired_pages_pending",
    ),
    # Faults and traffic
    *_fields(f.RECOVERY_ACTION, "DEV_GPU_RECOVERY_ACTION"),
    *_fields(
        f.PCIE_REPLAYS, "DEV_PCIE_REPLAY_TOTAL DEV_PCIE_REPLAY_COUNTER dcgm_pcie_replay_counter"
    ),
    *(
        field
        for spellings, error in (
            ("CRC_FLIT_ERROR_TOTAL CRC_FLIT_ERROR_COUNT_TOTAL", "crc_flit"),
            ("CRC_DATA_ERROR_TOTAL CRC_DATA_ERROR_COUNT_TOTAL", "crc_data"),
            ("REPLAY_ERROR_TOTAL REPLAY_ERROR_COUNT_TOTAL", "replay"),
            ("RECOVERY_EVENT_TOTAL RECOVERY_ERROR_TOTAL RECOVERY_ERROR_COUNT_TOTAL", "recovery"),
            ("RECOVERY_FAILED_TOTAL", "recovery_failed"),
            ("RX_PACKET_MALFORMED_TOTAL", "malformed_packet"),
            ("RX_PACKET_DROPPED_TOTAL", "buffer_overrun"),
            ("INTEGRITY_ERROR_TOTAL", "link_integrity"),
        )
        for field in _fields(
            f.NVLINK_ERRORS, " ".join(f"DEV_NVLINK_{name}" for name in spellings.split()), error
        )
    ),
)

# The facts that MIG divides among its instances. All others are of the board, also in the row of an
# instance (DcgmCacheManager.cpp).
DIVIDED_FACTS = frozenset(
    fact.name
    for fact in (
        f.MEMORY_TOTAL,
        f.MEMORY_USED,
        f.MEMORY_FREE,
        f.MEMORY_RESERVED,
        f.UTILIZATION,
        f.MEMORY_BUSY,
        f.GRAPHICS_ACTIVE,
        f.SM_ACTIVE,
        f.SM_OCCUPANCY,
        f.TENSOR_ACTIVE,
        f.DRAM_ACTIVE,
    )
)

# The number of the last Xid; it stays until another comes.
XID_LAST = ("DCGM_FI_DEV_XID_ERROR", "DCGM_FI_DEV_XID_ERRORS", "dcgm_xid_errors")
# By label `xid`: the number in the exporter's last minutes, and the number since it started
# (dcgm-exporter: internal/pkg/collector/expcollector.go, xid_total_collector.go).
XID_WINDOW = "DCGM_EXP_XID_ERRORS_COUNT"
XID_TOTAL = "DCGM_EXP_XID_ERRORS_TOTAL"

# dcgm_structs.h: blank, not found, not supported and not permissioned, one after the other.
_BLANKS = frozenset(
    float(first + step)
    for first in (0x7FFFFFF0, 2**47)  # DCGM_INT32_BLANK, DCGM_FP64_BLANK
    for step in range(4)
)
# DCGM_INT64_BLANK and its neighbours, which are one number in floating point.
_BLANK_INT64 = float(0x7FFFFFFFFFFFFFF0)


def is_blank(value: float) -> bool:
    """Whether this value is one of DCGM's words for no value."""
    return value in _BLANKS or value >= _BLANK_INT64
