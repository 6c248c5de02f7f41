"""GPUs: everything that is published of them."""

from agent.catalog import gpu_facts as fact
from agent.catalog.metric import Kind, Metric
from agent.render.dashboards.panel_expressions import GPU, gauge, rate
from agent.render.dashboards.panel_parts import Panel, PanelRow, PanelUnit, Query, warn_above
from agent.render.dashboards.panel_styles import STAT, STATES
from agent.render.promql import by, eq


def _newest(metric: Metric, *more: str, what: str = "") -> Query:
    """The value of each GPU; two agents that see one GPU tell the same."""
    labels = (*GPU, *more)
    shape = rate if metric.kind is Kind.COUNTER else gauge
    named = " ".join(f"{{{{{label}}}}}" for label in labels)
    return Query(expression=by(labels, shape(metric), "max"), legend=f"{named} {what}".rstrip())


_SOUND = (
    Panel(
        title="GPUs that answer",
        description="1 while the GPU can be read; 0 is a GPU that was there and is lost.",
        unit=PanelUnit.NUMBER,
        queries=(_newest(fact.UP),),
        style=STATES,
        thresholds=warn_above(1, "green"),
        highest=1,
    ),
    Panel(
        title="Action that the driver asks for",
        description="0 nothing, 1 reset, 2 reboot, 3 drain, 4 drain and reset.",
        unit=PanelUnit.NUMBER,
        queries=(_newest(fact.RECOVERY_ACTION),),
        style=STAT,
        thresholds=warn_above(1),
    ),
    Panel(
        title="Time since an Xid was reported",
        description="By its number. 48, 79, 94 and 95 are broken hardware; 13, 31 and 43 are "
        "brought about by programs.",
        unit=PanelUnit.SECONDS,
        queries=(
            Query(
                expression=f"time() - {by((*GPU, 'xid'), gauge(fact.XID_LAST_SEEN), 'max')}",
                legend="{{gpu}} Xid {{xid}}",
            ),
        ),
        style=STAT,
    ),
    Panel(
        title="Xids",
        description="Xid errors per second that the driver reported while the agent listened.",
        unit=PanelUnit.PER_SECOND,
        queries=(_newest(fact.XID_ERRORS, "xid"),),
    ),
    Panel(
        title="Share of time throttled, by reason",
        description="A software power cap is how a GPU works under full load. Heat and power "
        "brakes are faults of the machine: look at its fans and its power supply.",
        unit=PanelUnit.SHARE,
        queries=(_newest(fact.THROTTLED_TIME, "reason"),),
        highest=1,
    ),
    Panel(
        title="Throttled at this moment, by reason",
        description="1 while the reason holds the clocks down. A sample: it misses short ones, "
        "which the share of time has.",
        unit=PanelUnit.NUMBER,
        queries=(_newest(fact.THROTTLE_ACTIVE, "reason"),),
        style=STATES,
        thresholds=warn_above(1, "orange"),
        highest=1,
    ),
)


_USE = (
    Panel(
        title="GPU busy",
        description="Share of time in which any kernel ran. It tells idle from busy and nothing of "
        "efficiency: one busy SM makes it 1.",
        unit=PanelUnit.SHARE,
        queries=(_newest(fact.UTILIZATION), _newest(fact.MEMORY_BUSY, what="memory")),
        highest=1,
    ),
    Panel(
        title="Tensor cores and memory bandwidth",
        description="By the hardware's own counters, Hopper and newer. Decode lives on bandwidth, "
        "prefill on tensor cores; neither near 1 under load is work to be gained.",
        unit=PanelUnit.SHARE,
        queries=(
            _newest(fact.TENSOR_ACTIVE, what="tensor cores"),
            _newest(fact.DRAM_ACTIVE, what="bandwidth"),
        ),
        highest=1,
    ),
    Panel(
        title="SMs",
        description="Share of time with work on the SMs, how many warps they hold, and any work on "
        "the GPU at all. By the hardware's own counters, Hopper and newer.",
        unit=PanelUnit.SHARE,
        queries=(
            _newest(fact.SM_ACTIVE, what="SMs active"),
            _newest(fact.SM_OCCUPANCY, what="occupancy"),
            _newest(fact.GRAPHICS_ACTIVE, what="any work"),
        ),
        highest=1,
    ),
)


_MEMORY = (
    Panel(
        title="GPU memory",
        description="Used by processes, and all there is. An engine takes nearly all of it when it "
        "starts; that is no fault.",
        unit=PanelUnit.BYTES,
        queries=(
            _newest(fact.MEMORY_USED, what="used"),
            _newest(fact.MEMORY_TOTAL, what="maximum"),
        ),
    ),
    Panel(
        title="GPU memory free",
        description="What can still be allocated. Near 0 the next allocation fails.",
        unit=PanelUnit.BYTES,
        queries=(_newest(fact.MEMORY_FREE),),
    ),
    Panel(
        title="GPU memory of the driver",
        description="What the driver keeps for itself.",
        unit=PanelUnit.BYTES,
        queries=(_newest(fact.MEMORY_RESERVED),),
    ),
)


_POWER = (
    Panel(
        title="Power",
        description="Power draw and its limit. At the limit the clocks give way.",
        unit=PanelUnit.WATTS,
        queries=(_newest(fact.POWER), _newest(fact.POWER_LIMIT, what="limit")),
    ),
    Panel(
        title="Power by the energy counter",
        description="Energy used per second, which misses no peak, beside the power of the moment.",
        unit=PanelUnit.WATTS,
        queries=(_newest(fact.ENERGY, what="mean"), _newest(fact.POWER_INSTANT, what="moment")),
    ),
    Panel(
        title="Temperature",
        description="Of the chip and its memory. Hot is normal; what matters is throttling.",
        unit=PanelUnit.CELSIUS,
        queries=(_newest(fact.TEMPERATURE, "sensor"),),
    ),
    *(
        Panel(
            title=title,
            description="Now, and at most. Low under load is throttling, low when idle is saving.",
            unit=PanelUnit.HERTZ,
            queries=tuple(
                Query(
                    expression=by(GPU, gauge(metric, eq("clock", label)), "max"),
                    legend=f"{{{{gpu}}}}{what}",
                )
                for metric, what in ((fact.CLOCK, ""), (fact.CLOCK_MAX, " maximum"))
            ),
        )
        for title, label in (("Clock of the SMs", "sm"), ("Clock of the memory", "memory"))
    ),
)


_TRAFFIC = (
    Panel(
        title="PCIe",
        description="Bytes per second over PCIe. Much of it while serving is swapping or loading.",
        unit=PanelUnit.BYTES_PER_S,
        queries=(
            _newest(fact.PCIE_TRANSMITTED, what="sent"),
            _newest(fact.PCIE_RECEIVED, what="received"),
        ),
    ),
    Panel(
        title="PCIe replays",
        description="Packets that had to be sent again. Steadily many are a bad slot or riser.",
        unit=PanelUnit.PER_SECOND,
        queries=(_newest(fact.PCIE_REPLAYS),),
    ),
    Panel(
        title="NVLink",
        description="Bytes per second over all NVLinks: the traffic of tensor parallelism.",
        unit=PanelUnit.BYTES_PER_S,
        queries=(
            _newest(fact.NVLINK_TRANSMITTED, what="sent"),
            _newest(fact.NVLINK_RECEIVED, what="received"),
        ),
    ),
    Panel(
        title="NVLink errors",
        description="By kind, over all links. Flit CRC errors now and then are normal; any other "
        "is a bad link.",
        unit=PanelUnit.PER_SECOND,
        queries=(_newest(fact.NVLINK_ERRORS, "error"),),
    ),
)


_FAULTS = (
    Panel(
        title="ECC errors",
        description="Corrected ones now and then are normal; an uncorrected one kills what used "
        "that memory.",
        unit=PanelUnit.PER_SECOND,
        queries=(_newest(fact.ECC_ERRORS, "severity", "since"),),
    ),
    Panel(
        title="ECC on",
        description="1 while ECC is on. Without it memory errors are not seen.",
        unit=PanelUnit.NUMBER,
        queries=(_newest(fact.ECC_ENABLED),),
        style=STATES,
        thresholds=warn_above(1, "green"),
        highest=1,
    ),
    Panel(
        title="Memory waiting to be replaced, or not replaceable",
        description="Pending: the next reset repairs it. Failed: no spare is left, the GPU must be "
        "exchanged. Pages are those of GPUs before Ampere.",
        unit=PanelUnit.NUMBER,
        queries=(
            _newest(fact.ROW_REMAP_PENDING, what="row pending"),
            _newest(fact.ROW_REMAP_FAILED, what="row failed"),
            _newest(fact.PAGE_RETIREMENT_PENDING, what="page pending"),
        ),
        style=STATES,
        thresholds=warn_above(1),
        highest=1,
    ),
    Panel(
        title="Memory replaced",
        description="Rows remapped and, before Ampere, pages retired, per second and by cause.",
        unit=PanelUnit.PER_SECOND,
        queries=(
            _newest(fact.REMAPPED_ROWS, "cause", what="rows"),
            _newest(fact.RETIRED_PAGES, "cause", what="pages"),
        ),
    ),
)


GPU_ROWS = (
    PanelRow("Is every GPU sound", _SOUND),
    PanelRow("Use", _USE),
    PanelRow("Memory", _MEMORY),
    PanelRow("Power, temperature and clocks", _POWER),
    PanelRow("Traffic", _TRAFFIC),
    PanelRow("Faults of memory", _FAULTS),
)
