"""Cases of alerts on GPUs."""

from tests.render.alerts.cases import AGENT, GPU, ON_GPU, Case, Series
from tests.render.alerts.engine_cases import PAGE, TICKET

ON_AGENT = {"instance": "a:9470"}
OTHER_UP = f'gpu_up{{{AGENT},gpu="GPU-2"}}'


def _gpu(name: str, values: str, **labels: str) -> Series:
    more = "".join(f',{label}="{value}"' for label, value in labels.items())
    return {f"gpu_{name}{{{GPU}{more}}}": values}


def _failures(reason: str) -> str:
    return f'llm_agent_gpu_failures_total{{{AGENT},reason="{reason}"}}'


def _memory(free: str, used: str) -> Series:
    return {
        **_gpu("memory_total_bytes", "100x200"),
        **_gpu("memory_free_bytes", free),
        **_gpu("memory_used_bytes", used),
    }


def _xid(number: int, values: str) -> Series:
    return _gpu("xid_last_seen_timestamp_seconds", values, xid=str(number))


def _flag(alert: str, name: str, hold: str, severity: dict[str, str], *figures: str) -> Case:
    return Case(
        alert=alert,
        incident=_gpu(name, "0x5 1x15 0x20"),
        lookalike=_gpu(name, hold),
        minutes=(4, 15, 25),
        labels={**ON_GPU, **severity},
        figures=figures,
    )


def _of_xid(
    alert: str, number: int, harmless: int, severity: dict[str, str], *figures: str
) -> Case:
    return Case(
        alert=alert,
        # Published in the tenth minute, by the agent's clock.
        incident=_xid(number, "_x10 600x130"),
        lookalike=_xid(harmless, "_x10 600x130"),
        minutes=(9, 12, 75),
        labels={**ON_GPU, **severity, "xid": str(number)},
        figures=figures,
    )


CASES = (
    Case(
        alert="GpuLost",
        # The reason is the GPU's, and not that the agent cannot see any.
        incident={
            **_gpu("up", "1x10 0x10 1x20"),
            _failures("gpu_lost"): "0x10 4+4x9 40x20",
            _failures("no_library"): "7x40",
        },
        # One failed reading.
        lookalike=_gpu("up", "1x10 0 1x30"),
        minutes=(10, 15, 25),
        labels={**ON_GPU, **PAGE},
    ),
    Case(
        alert="GpuLost",
        # A poll of all GPUs fails now and then, and hides no loss.
        incident={
            **_gpu("up", "1x10 0x15 1x20"),
            OTHER_UP: "1x12 0 1 1 0 1 1 0 1x30",
            _failures("exporter_timeout"): "0x12 1x2 2x2 3x30",
        },
        # The exporter stands still, or the agent has an error of its own, which no GPU does.
        lookalike={
            **_gpu("up", "1x15 0x4 1x6 0x4 1x20"),
            OTHER_UP: "1x15 0x4 1x6 0x4 1x20",
            _failures("exporter_stale"): "0x15 4+4x4 20x40",
            _failures("internal"): "0x27 4+4x4 20x30",
        },
        minutes=(10, 20, 30),
        labels={**ON_GPU, **PAGE},
    ),
    Case(
        alert="GpuUnseen",
        incident={
            **_gpu("up", "1x10 0x15 1x20"),
            _failures("exporter_connection"): "0x10 4+4x14 60x20",
        },
        # A machine that has no GPU, and an exporter that was started anew.
        lookalike={
            _failures("no_library"): "0+60x40",
            **_gpu("up", "1x10 0x1 1x40"),
            _failures("exporter_timeout"): "0x10 4x40",
        },
        minutes=(14, 18, 33),
        labels={**ON_AGENT, **TICKET, "reason": "exporter_connection"},
        figures=("12",),
    ),
    _flag("GpuRecoveryWanted", "recovery_action", "0x40", TICKET, "1"),
    _of_xid("GpuXidCritical", 79, 43, PAGE),
    Case(
        alert="GpuXidCritical",
        # Lost for longer than the alert on the Xid alone fires.
        incident={**_xid(79, "_x10 600x130"), **_gpu("up", "1x10 0x60 1x60")},
        # Long over, and the GPU is read.
        lookalike={**_xid(79, "_x10 0x130"), **_gpu("up", "_x20 1x110")},
        minutes=(9, 60, 75),
        labels={**ON_GPU, **PAGE, "xid": "79"},
        # This is muted.
        also={"GpuLost": 1},
    ),
    Case(
        alert="GpuXidCritical",
        # The counter of the same errors tells them no second time, and not later either.
        incident={
            **_xid(48, "_x10 600x130"),
            **_gpu("ecc_errors_total", "7x10 9x120", severity="uncorrected", since="driver_load"),
        },
        lookalike=_gpu("ecc_errors_total", "7x130", severity="uncorrected", since="lifetime"),
        minutes=(9, 12, 60),
        labels={**ON_GPU, **PAGE, "xid": "48"},
    ),
    # A number that no table knows wants a look as well.
    _of_xid("GpuXidWarning", 171, 45, TICKET, "2m 0s"),
    Case(
        alert="GpuXidApplication",
        incident=_gpu("xid_errors_total", "0x5 1x5 2x5 3x5 4x100", xid="31"),
        lookalike=_gpu("xid_errors_total", "0x5 1x100", xid="31"),
        minutes=(4, 22, 90),
        labels={**ON_GPU, **TICKET, "xid": "31"},
        figures=("3",),
    ),
    Case(
        alert="GpuEccUncorrected",
        incident=_gpu(
            "ecc_errors_total", "7x10 9x120", severity="uncorrected", since="driver_load"
        ),
        # What was there before, and what ECC repaired.
        lookalike={
            **_gpu("ecc_errors_total", "7x130", severity="uncorrected", since="lifetime"),
            **_gpu("ecc_errors_total", "0+5x130", severity="corrected", since="driver_load"),
        },
        minutes=(8, 15, 90),
        labels={**ON_GPU, **PAGE},
        figures=("2.067",),
    ),
    Case(
        alert="GpuNvlinkErrors",
        incident=_gpu("nvlink_errors_total", "7x10 9x120", error="replay"),
        # What was there before, and what the link repairs by itself.
        lookalike={
            **_gpu("nvlink_errors_total", "7x130", error="replay"),
            **_gpu("nvlink_errors_total", "0+5x130", error="crc_flit"),
        },
        minutes=(8, 15, 90),
        labels={**ON_GPU, **TICKET, "error": "replay"},
        figures=("2.067",),
    ),
    _flag("GpuRowRemapFailed", "row_remap_failed", "0x40", PAGE),
    _flag("GpuRowRemapPending", "page_retirement_pending", "0x40", TICKET),
    # The reset came at once.
    _flag("GpuRowRemapPending", "row_remap_pending", "0x10 1x3 0x30", TICKET),
    Case(
        alert="GpuThrottled",
        incident=_gpu("throttled_seconds_total", "0+30x20 600x40", reason="hw_thermal"),
        # A power cap at full load is how a GPU works, and now and then it is hot.
        lookalike={
            **_gpu("throttled_seconds_total", "0+60x60", reason="sw_power_cap"),
            **_gpu("throttled_seconds_total", "0+5x60", reason="hw_thermal"),
        },
        minutes=(2, 18, 45),
        labels={**ON_GPU, **TICKET, "reason": "hw_thermal"},
        figures=("50%",),
    ),
    Case(
        alert="GpuMemoryShort",
        incident=_memory("6x5 0.5x20 6x20", "94x60"),
        # What an engine holds by its settings is no shortage.
        lookalike=_memory("4x60", "96x60"),
        minutes=(12, 20, 35),
        labels={**ON_GPU, **TICKET},
        figures=("0.5%",),
    ),
    Case(
        alert="GpuIdle",
        incident={**_memory("8x150", "92x150"), **_gpu("utilization_ratio", "0x80 0.6x60")},
        # Nobody holds it, so nobody wastes it.
        lookalike={**_memory("99x150", "1x150"), **_gpu("utilization_ratio", "0x150")},
        minutes=(50, 70, 90),
        labels={**ON_GPU, **TICKET},
        figures=("0%",),
    ),
)
