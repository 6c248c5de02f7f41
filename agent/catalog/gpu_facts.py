"""The facts of a GPU, with our names and units: one row per fact, for every source.

Every fact is published with the label `gpu`, the GPU's UUID, before its own labels. Two agents that
read one GPU publish the same values, so MAX merges them.
"""

from functools import partial

from agent.catalog.metric import Merge, Metric, Unit, counter, gauge

_NO_COUNTERS = "before Hopper, at the first poll, and if the driver refuses"
_NVML_ALONE = "if the GPU does not report it, and with dcgm-exporter"

_gauge = partial(gauge, merge=Merge.MAX)
_counter = partial(counter, merge=Merge.MAX)

UP = _gauge(
    "gpu_up",
    "1 when the GPU was read at the last try, 0 when it was seen before and could not be read.",
    absent="until a GPU was read",
)

# Memory
MEMORY_TOTAL = _gauge("gpu_memory_total_bytes", "Memory of the GPU.", unit=Unit.BYTES)
MEMORY_USED = _gauge(
    "gpu_memory_used_bytes", "Memory held by processes, the driver's own left out.", unit=Unit.BYTES
)
MEMORY_FREE = _gauge("gpu_memory_free_bytes", "Memory that can be allocated.", unit=Unit.BYTES)
MEMORY_RESERVED = _gauge(
    "gpu_memory_reserved_bytes", "Memory that the driver keeps for itself.", unit=Unit.BYTES
)

# Utilisation. Neither measures efficiency: one busy SM makes the first 1.
UTILIZATION = _gauge(
    "gpu_utilization_ratio",
    "Share of the driver's last sample in which any kernel ran; only separates idle from busy.",
    unit=Unit.RATIO,
)
MEMORY_BUSY = _gauge(
    "gpu_memory_busy_ratio",
    "Share of the driver's last sample in which memory was read or written; no bandwidth.",
    unit=Unit.RATIO,
)

# Activity by the hardware's own counters, Hopper and newer
GRAPHICS_ACTIVE = _gauge(
    "gpu_graphics_active_ratio",
    "Share of time in which any compute or graphics work was on the GPU.",
    unit=Unit.RATIO,
    absent=_NO_COUNTERS,
)
SM_ACTIVE = _gauge(
    "gpu_sm_active_ratio",
    "Share of time in which an SM had work, averaged over the SMs.",
    unit=Unit.RATIO,
    absent=_NO_COUNTERS,
)
SM_OCCUPANCY = _gauge(
    "gpu_sm_occupancy_ratio",
    "Warps on the SMs over the most they can hold.",
    unit=Unit.RATIO,
    absent=_NO_COUNTERS,
)
TENSOR_ACTIVE = _gauge(
    "gpu_tensor_active_ratio",
    "Share of cycles in which tensor cores worked, at whatever clock and precision.",
    unit=Unit.RATIO,
    absent=_NO_COUNTERS,
)
DRAM_ACTIVE = _gauge(
    "gpu_dram_active_ratio",
    "Memory bandwidth used over the theoretical bandwidth.",
    unit=Unit.RATIO,
    absent=_NO_COUNTERS,
)

# Power and energy
POWER = _gauge(
    "gpu_power_watts",
    "Power draw: the mean of a second from Ampere on, of the moment on GA100 and older.",
    unit=Unit.WATTS,
)
POWER_INSTANT = _gauge("gpu_power_instant_watts", "Power draw of the moment.", unit=Unit.WATTS)
POWER_LIMIT = _gauge("gpu_power_limit_watts", "Power limit in force.", unit=Unit.WATTS)
ENERGY = _counter(
    "gpu_energy_joules",
    "Energy used since the driver was loaded.",
    unit=Unit.JOULES,
)

# The driver
PERSISTENCE = _gauge(
    "gpu_persistence_mode",
    "1 while the driver stays loaded without a program on the GPU, 0 while it does not.",
)

# Clocks and temperatures
CLOCK = _gauge(
    "gpu_clock_hertz",
    "Clock of the SMs or the memory now.",
    "clock",
    unit=Unit.HERTZ,
)
CLOCK_MAX = _gauge(
    "gpu_clock_max_hertz", "Highest clock of the SMs or the memory.", "clock", unit=Unit.HERTZ
)
TEMPERATURE = _gauge(
    "gpu_temperature_celsius", "Temperature of the chip or its memory.", "sensor", unit=Unit.CELSIUS
)

# Throttling
THROTTLE_ACTIVE = _gauge(
    "gpu_throttle_active",
    "1 while the reason holds the clocks down, 0 while not; times between two samples are missed.",
    "reason",
)
THROTTLED_TIME = _counter(
    "gpu_throttled_seconds",
    "Time for which the reason held the clocks down.",
    "reason",
    unit=Unit.SECONDS,
)

# Bits of the reasons in nvml.h. dcgm_fields.h has DCGM_CLOCKS_EVENT_REASON_*, "a 1:1 map to the
# NVML reasons".
THROTTLE_REASONS = {
    0x1: "idle",
    0x2: "application_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}

# Memory errors
ECC_ENABLED = _gauge("gpu_ecc_enabled", "1 while ECC is on, 0 while it is off.")
ECC_ERRORS = _counter(
    "gpu_ecc_errors",
    "ECC errors, corrected or uncorrected, since the driver was loaded or in the GPU's lifetime.",
    "severity",
    "since",
)
REMAPPED_ROWS = _counter(
    "gpu_remapped_rows", "Memory rows replaced after corrected or uncorrected errors.", "cause"
)
ROW_REMAP_PENDING = _gauge(
    "gpu_row_remap_pending", "1 when a row is to be replaced at the next reset of the GPU."
)
ROW_REMAP_FAILED = _gauge(
    "gpu_row_remap_failed", "1 when a row could not be replaced: the GPU must be replaced."
)
RETIRED_PAGES = _counter(
    "gpu_retired_pages",
    "Memory pages given up after corrected or uncorrected errors, before Ampere.",
    "cause",
    absent="on Ampere and newer",
)
PAGE_RETIREMENT_PENDING = _gauge(
    "gpu_page_retirement_pending",
    "1 when a page is given up at the next start, before Ampere.",
    absent="on Ampere and newer",
)

# Faults
XID_ERRORS = _counter(
    "gpu_xid_errors", "Xid errors that the driver reported while the agent listened.", "xid"
)
XID_LAST_SEEN = _gauge(
    "gpu_xid_last_seen_timestamp_seconds",
    "When the Xid error was last reported, in Unix time.",
    "xid",
    unit=Unit.SECONDS,
    absent="until the Xid was reported",
)
RECOVERY_ACTION = _gauge(
    "gpu_recovery_action",
    "Action that the driver requests: 0 none, 1 reset, 2 reboot, 3 drain, 4 drain and reset, 5 and "
    "up as its documentation says.",
)

# Traffic
PCIE_TRANSMITTED = _counter(
    "gpu_pcie_transmitted_bytes",
    "Bytes sent over PCIe; the driver may wrap it.",
    unit=Unit.BYTES,
    absent=_NVML_ALONE,
)
PCIE_RECEIVED = _counter(
    "gpu_pcie_received_bytes",
    "Bytes received over PCIe; the driver may wrap it.",
    unit=Unit.BYTES,
    absent=_NVML_ALONE,
)
PCIE_REPLAYS = _counter("gpu_pcie_replays", "PCIe packets that had to be sent again.")
NVLINK_TRANSMITTED = _counter(
    "gpu_nvlink_transmitted_bytes",
    "Bytes sent over all NVLinks.",
    unit=Unit.BYTES,
    absent=_NVML_ALONE,
)
NVLINK_RECEIVED = _counter(
    "gpu_nvlink_received_bytes",
    "Bytes received over all NVLinks.",
    unit=Unit.BYTES,
    absent=_NVML_ALONE,
)
NVLINK_ERRORS = _counter(
    "gpu_nvlink_errors",
    "Errors over all NVLinks; up to NVLink 4 crc_flit, crc_data, replay and recovery.",
    "error",
)

# Every fact above, in the order of its declaration.
GPU_FACTS = tuple(fact for fact in list(globals().values()) if isinstance(fact, Metric))
