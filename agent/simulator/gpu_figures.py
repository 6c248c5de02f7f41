"""The figures of a simulated engine's GPU, by the work of its steps."""

from collections.abc import Mapping
from dataclasses import dataclass

from agent.simulator.engine_steps import Step
from agent.simulator.scenario import SimulatedGpu

# Tensor cores are busy for longer than the work at their peak takes.
_TENSOR_EFFICIENCY = 0.9
_IDLE_CELSIUS = 38.0
_HOT_CELSIUS = 74.0
_SM_HERTZ = 1.98e9


@dataclass(frozen=True, slots=True)
class _GpuWork:
    """What all steps so far added up to."""

    at_s: float = 0.0
    flops: float = 0.0
    bytes_: float = 0.0
    busy_s: float = 0.0


class GpuFigures:
    """Adds up the work of steps; each `read` gives the figures of the time since the last one."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        self._now = self._read = _GpuWork()
        self._joules = 0.0

    def observe(self, step: Step) -> None:
        """Add one step of the engine."""
        now = self._now
        self._now = _GpuWork(
            now.at_s,
            now.flops + step.flops,
            now.bytes_ + step.read_bytes + step.written_bytes,
            now.busy_s + (step.ended_s - step.began_s) * step.times,
        )

    def read(self, at_s: float) -> Mapping[str, float | str]:
        """The GPU's figures at a time of the engine."""
        gpu, now, before = self._gpu, self._now, self._read
        passed_s = max(at_s - before.at_s, 1e-3)
        tensor = (now.flops - before.flops) / gpu.flops_per_s / _TENSOR_EFFICIENCY / passed_s
        dram = (now.bytes_ - before.bytes_) / gpu.bytes_per_s / passed_s
        busy = min(1.0, (now.busy_s - before.busy_s) / passed_s)
        load = min(1.0, 0.25 * busy + 0.45 * dram + 0.3 * tensor)
        watts = gpu.idle_watts + load * (gpu.limit_watts - gpu.idle_watts)
        self._joules += watts * passed_s
        self._read = _GpuWork(at_s, now.flops, now.bytes_, now.busy_s)
        return {
            "uuid": gpu.uuid,
            "name": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "memory_used_bytes": gpu.memory_used_bytes,
            "busy": busy,
            "tensor": min(1.0, tensor),
            "dram": min(1.0, dram),
            "watts": watts,
            "limit_watts": gpu.limit_watts,
            "joules": self._joules,
            "celsius": _IDLE_CELSIUS + load * (_HOT_CELSIUS - _IDLE_CELSIUS),
            "clock_hertz": _SM_HERTZ,
        }
