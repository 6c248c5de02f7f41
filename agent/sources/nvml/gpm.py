"""The hardware's activity counters (GPM), which NVML reads on Hopper and newer."""

import math
from typing import Any

from agent.catalog import gpu_facts as f
from agent.catalog.metric import Metric
from agent.records.gpu import FactKey
from agent.sources.nvml.calls import GpuCalls

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
