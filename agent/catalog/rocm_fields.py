"""The series of AMD's device-metrics-exporter that give our GPU facts.

Sources, of ROCm/device-metrics-exporter 1.5: names and units
`pkg/amdgpu/gpuagent/gpuagent_gpu_metrics.go`, meaning `docs/configuration/metricslist.md` and
`internal/metricsmap.md`. VRAM in "MB" is in MiB: an MI300X has 196592 of them. A partition without
a sensor of its own may export 0 for it.

Left out, because the value does not mean the same as our fact:

gpu_prof_*                a share of the cycles in which the GPU was busy, not of all
gpu_violation_*           residencies without a unit
gpu_health                the exporter's own verdict
pcie_*bandwidth           rates
gpu_xgmi_*                links of another kind than NVLink
"""

from collections.abc import Iterator
from typing import Any

from agent.catalog import gpu_facts as f
from agent.catalog.dcgm_fields import MHZ, MIB, PERCENT, DcgmField
from agent.catalog.metric import Metric


def _fields(fact: Metric, series: str, *labels: str, **options: Any) -> Iterator[DcgmField]:
    """A field for each name in `series`, also with the prefix of AMD's example configuration."""
    for name in series.split():
        for full in (name, f"amd_{name}"):
            yield DcgmField(series=full, fact=fact.name, labels=labels, **options)


def _clocks(fact: Metric, series: str) -> Iterator[DcgmField]:
    """The clocks of the compute units and of the memory. Before 1.4.2 their types had a prefix."""
    for clock, kind in (("sm", "system"), ("memory", "memory")):
        of_kind = ("clock_type", (kind, f"GPU_CLOCK_TYPE_{kind.upper()}"))
        yield from _fields(fact, series, clock, scale=MHZ, only=of_kind)


ROCM_FIELDS: tuple[DcgmField, ...] = (
    *_fields(f.MEMORY_TOTAL, "gpu_total_vram", scale=MIB, zero_means_off=True),
    *_fields(f.MEMORY_FREE, "gpu_free_vram", scale=MIB),
    *_fields(f.MEMORY_USED, "gpu_used_vram", scale=MIB),
    *_fields(f.UTILIZATION, "gpu_gfx_activity", scale=PERCENT),
    *_fields(f.MEMORY_BUSY, "gpu_umc_activity", scale=PERCENT),
    # MI300 and newer; MI200 and Radeon; both.
    *_fields(
        f.POWER,
        "gpu_package_power gpu_average_package_power gpu_power_usage",
        zero_means_off=True,
    ),
    *_fields(f.ENERGY, "gpu_energy_consumed", scale=1e-6, zero_means_off=True),
    *_clocks(f.CLOCK, "gpu_clock"),
    *_clocks(f.CLOCK_MAX, "gpu_max_clock"),
    *_fields(
        f.TEMPERATURE, "gpu_junction_temperature gpu_edge_temperature", "gpu", zero_means_off=True
    ),
    *_fields(f.TEMPERATURE, "gpu_memory_temperature", "memory", zero_means_off=True),
    *_fields(f.ECC_ERRORS, "gpu_ecc_correct_total", "corrected", "driver_load"),
    *_fields(f.ECC_ERRORS, "gpu_ecc_uncorrect_total", "uncorrected", "driver_load"),
    *_fields(f.PCIE_REPLAYS, "pcie_replay_count"),
)
