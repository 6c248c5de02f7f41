"""Panels on GPUs: every fact that the agent publishes of them."""

from agent.catalog import gpu_facts as fact
from agent.catalog.metric import Metric
from agent.render.dashboards.panel_parts import (
    GPU,
    STAT,
    STATES,
    Panel,
    PanelRow,
    PanelUnit,
    Query,
    gauge,
    max_by,
    warn_above,
)
from agent.render.promql import by, eq


def _per_gpu(metric: Metric, what: str = "", label: str | None = None) -> Query:
    """One value for each GPU, and for each value of `label`, if several agents see one GPU."""
    return max_by(GPU if label is None else (*GPU, label), metric, what)


_HEALTH = (
    Panel(
        "GPUs that answer",
        "1 while the GPU can be read; 0 for a GPU that was there and is lost.",
        PanelUnit.NUMBER,
        (_per_gpu(fact.UP),),
        style=STATES,
        thresholds=warn_above(1, "green"),
        highest=1,
    ),
    Panel(
        "Action that the driver asks for",
        "0 nothing, 1 reset, 2 reboot, 3 drain, 4 drain and reset.",
        PanelUnit.NUMBER,
        (_per_gpu(fact.RECOVERY_ACTION),),
        style=STAT,
        thresholds=warn_above(1),
    ),
    Panel(
        "Time since an Xid was reported",
        "By Xid number. 48, 79, 94 and 95 are broken hardware; programs cause 13, 31 and 43.",
        PanelUnit.SECONDS,
        (
            Query(
                f"time() - {by((*GPU, 'xid'), gauge(fact.XID_LAST_SEEN), 'max')}",
                "{{gpu}} Xid {{xid}}",
            ),
        ),
        style=STAT,
    ),
    Panel(
        "Xids",
        "Xid errors per second that the driver reported while the agent listened.",
        PanelUnit.PER_SECOND,
        (_per_gpu(fact.XID_ERRORS, label="xid"),),
    ),
    Panel(
        "Share of time throttled, by reason",
        "A software power cap is normal under full load. Heat and power brakes are faults of the "
        "machine: check its fans and its power supply.",
        PanelUnit.SHARE,
        (_per_gpu(fact.THROTTLED_TIME, label="reason"),),
        highest=1,
    ),
    Panel(
        "Throttled at this moment, by reason",
        "1 while the reason holds the clocks down. Samples miss short times; the share of time "
        "includes them.",
        PanelUnit.NUMBER,
        (_per_gpu(fact.THROTTLE_ACTIVE, label="reason"),),
        style=STATES,
        thresholds=warn_above(1, "orange"),
        highest=1,
    ),
)

_USE = (
    Panel(
        "GPU busy",
        "Share of time in which any kernel ran. It separates idle from busy and does not measure "
        "efficiency: one busy SM makes it 1.",
        PanelUnit.SHARE,
        (_per_gpu(fact.UTILIZATION), _per_gpu(fact.MEMORY_BUSY, "memory")),
        highest=1,
    ),
    Panel(
        "Tensor cores and memory bandwidth",
        "From the hardware's counters, Hopper and newer. Decode needs bandwidth, prefill needs "
        "tensor cores. If neither is near 1 under load, the GPU can do more.",
        PanelUnit.SHARE,
        (_per_gpu(fact.TENSOR_ACTIVE, "tensor cores"), _per_gpu(fact.DRAM_ACTIVE, "bandwidth")),
        highest=1,
    ),
    Panel(
        "SMs",
        "Share of time with work on the SMs, how many warps they hold, and any work on the GPU. "
        "From the hardware's counters, Hopper and newer.",
        PanelUnit.SHARE,
        (
            _per_gpu(fact.SM_ACTIVE, "SMs active"),
            _per_gpu(fact.SM_OCCUPANCY, "occupancy"),
            _per_gpu(fact.GRAPHICS_ACTIVE, "any work"),
        ),
        highest=1,
    ),
)

_MEMORY = (
    Panel(
        "GPU memory",
        "Memory used by processes, and the total. An engine takes nearly all of it at its start; "
        "that is normal.",
        PanelUnit.BYTES,
        (_per_gpu(fact.MEMORY_USED, "used"), _per_gpu(fact.MEMORY_TOTAL, "maximum")),
    ),
    Panel(
        "GPU memory free",
        "Memory that can still be allocated. Near 0 the next allocation fails.",
        PanelUnit.BYTES,
        (_per_gpu(fact.MEMORY_FREE),),
    ),
    Panel(
        "GPU memory of the driver",
        "Memory that the driver reserves for itself.",
        PanelUnit.BYTES,
        (_per_gpu(fact.MEMORY_RESERVED),),
    ),
)

_POWER = (
    Panel(
        "Power",
        "Power draw and its limit. At the limit the clocks go down.",
        PanelUnit.WATTS,
        (_per_gpu(fact.POWER), _per_gpu(fact.POWER_LIMIT, "limit")),
    ),
    Panel(
        "Power by the energy counter",
        "Energy used per second, which includes every peak, and the power at this moment.",
        PanelUnit.WATTS,
        (_per_gpu(fact.ENERGY, "mean"), _per_gpu(fact.POWER_INSTANT, "moment")),
    ),
    Panel(
        "Temperature",
        "Of the chip and its memory. Hot is normal; a problem shows as throttling.",
        PanelUnit.CELSIUS,
        (_per_gpu(fact.TEMPERATURE, label="sensor"),),
    ),
    *(
        Panel(
            title,
            "Now, and at most. Low under load is throttling, low when idle saves power.",
            PanelUnit.HERTZ,
            (
                max_by(GPU, fact.CLOCK, "", eq("clock", clock)),
                max_by(GPU, fact.CLOCK_MAX, "maximum", eq("clock", clock)),
            ),
        )
        for title, clock in (("Clock of the SMs", "sm"), ("Clock of the memory", "memory"))
    ),
)

_TRAFFIC = (
    Panel(
        "PCIe",
        "Bytes per second over PCIe. Much of it while serving is swapping or loading.",
        PanelUnit.BYTES_PER_S,
        (_per_gpu(fact.PCIE_TRANSMITTED, "sent"), _per_gpu(fact.PCIE_RECEIVED, "received")),
    ),
    Panel(
        "PCIe replays",
        "Packets that were sent again. A steady rate means a bad slot or riser.",
        PanelUnit.PER_SECOND,
        (_per_gpu(fact.PCIE_REPLAYS),),
    ),
    Panel(
        "NVLink",
        "Bytes per second over all NVLinks: the traffic of tensor parallelism.",
        PanelUnit.BYTES_PER_S,
        (_per_gpu(fact.NVLINK_TRANSMITTED, "sent"), _per_gpu(fact.NVLINK_RECEIVED, "received")),
    ),
    Panel(
        "NVLink errors",
        "By kind, over all links. Flit CRC errors now and then are normal; any other kind is a "
        "bad link.",
        PanelUnit.PER_SECOND,
        (_per_gpu(fact.NVLINK_ERRORS, label="error"),),
    ),
)

_FAULTS = (
    Panel(
        "ECC errors",
        "Corrected errors now and then are normal. An uncorrected error kills the process that "
        "used that memory.",
        PanelUnit.PER_SECOND,
        (max_by((*GPU, "severity", "since"), fact.ECC_ERRORS),),
    ),
    Panel(
        "ECC on",
        "1 while ECC is on. Without ECC, memory errors are not detected.",
        PanelUnit.NUMBER,
        (_per_gpu(fact.ECC_ENABLED),),
        style=STATES,
        thresholds=warn_above(1, "green"),
        highest=1,
    ),
    Panel(
        "Persistence mode",
        "1 while the driver stays loaded without a program on the GPU. Without it, the next start "
        "of an engine and the first reads wait for the driver.",
        PanelUnit.NUMBER,
        (_per_gpu(fact.PERSISTENCE),),
        style=STATES,
        thresholds=warn_above(1, "green"),
        highest=1,
    ),
    Panel(
        "Memory waiting to be replaced, or not replaceable",
        "Pending: the next reset repairs it. Failed: no spare is left, the GPU must be exchanged. "
        "Pages are those of GPUs before Ampere.",
        PanelUnit.NUMBER,
        (
            _per_gpu(fact.ROW_REMAP_PENDING, "row pending"),
            _per_gpu(fact.ROW_REMAP_FAILED, "row failed"),
            _per_gpu(fact.PAGE_RETIREMENT_PENDING, "page pending"),
        ),
        style=STATES,
        thresholds=warn_above(1),
        highest=1,
    ),
    Panel(
        "Memory replaced",
        "Rows remapped and, before Ampere, pages retired, per second and by cause.",
        PanelUnit.PER_SECOND,
        (
            _per_gpu(fact.REMAPPED_ROWS, "rows", "cause"),
            _per_gpu(fact.RETIRED_PAGES, "pages", "cause"),
        ),
    ),
)

GPU_ROWS = (
    PanelRow("Is every GPU sound", _HEALTH),
    PanelRow("Use", _USE),
    PanelRow("Memory", _MEMORY),
    PanelRow("Power, temperature and clocks", _POWER),
    PanelRow("Traffic", _TRAFFIC),
    PanelRow("Faults of memory", _FAULTS),
)
