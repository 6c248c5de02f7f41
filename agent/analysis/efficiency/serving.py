"""A model on its GPUs, and how much work requests and steps are for it."""

from dataclasses import dataclass, field
from enum import StrEnum

from agent.analysis.physics.coefficients import Coefficients, coefficients
from agent.analysis.physics.flops_and_bytes import (
    decode_flops,
    decode_kv_bytes,
    prefill_flops,
    prefill_kv_bytes,
    step_weight_bytes,
)
from agent.analysis.physics.roofline import Roof
from agent.catalog.hardware import GpuModel
from agent.records.model import ModelShape, Parallelism, Work

_NO_WORK = Work(0.0, 0.0)


class Role(StrEnum):
    """The phases that an engine does. In disaggregated serving each engine does one."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A model spread over GPUs of one kind; `model` and `gpu` are None if they are unknown."""

    model: ModelShape | None = None
    gpu: GpuModel | None = None
    parallelism: Parallelism = field(default_factory=Parallelism)
    role: Role = Role.BOTH
    coefficients: Coefficients | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        found = None if self.model is None else coefficients(self.model)
        object.__setattr__(self, "coefficients", found)

    @property
    def peak_flops_per_s(self) -> float | None:
        """The dense peak of all GPUs together, in the precision of the model's products."""
        if self.gpu is None or self.model is None:
            return None
        peak = self.gpu.peak(self.model.compute)
        return None if peak is None else peak * self.parallelism.gpus

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """The memory bandwidth of all GPUs together."""
        if self.gpu is None:
            return None
        return self.gpu.bandwidth_bytes_per_s * self.parallelism.gpus

    @property
    def roof(self) -> Roof | None:
        """Peak and bandwidth; None if either is unknown."""
        peak, bandwidth = self.peak_flops_per_s, self.bandwidth_bytes_per_s
        return None if peak is None or bandwidth is None else Roof(peak, bandwidth)

    def utilisation(self, work: Work, seconds: float) -> tuple[float | None, float | None]:
        """(MFU, MBU) of work that all GPUs shared: ratios of what they could do in that time.

        Each is None if its peak is unknown or no time passed. More than 1 means a wrong peak or
        a wrong model.
        """
        if seconds <= 0:
            return None, None
        peak, bandwidth = self.peak_flops_per_s, self.bandwidth_bytes_per_s
        return (
            None if peak is None else work.flops / (seconds * peak),
            None if bandwidth is None else work.bytes_moved / (seconds * bandwidth),
        )

    def prefill(self, new: int, cached: int) -> Work:
        """Work of `new` prompt tokens after `cached` ones, without weights; 0 without a model."""
        if self.coefficients is None:
            return _NO_WORK
        return Work(
            prefill_flops(self.coefficients, new + cached, cached),
            prefill_kv_bytes(self.coefficients, new, cached, self.parallelism.tensor),
        )

    def decode(self, prompt: int, output: int) -> Work:
        """Work of all output tokens but the first, without weights; 0 without a model."""
        if self.coefficients is None:
            return _NO_WORK
        return Work(
            decode_flops(self.coefficients, prompt, output),
            decode_kv_bytes(self.coefficients, prompt, output, self.parallelism.tensor),
        )

    def weight_bytes(self, steps: float, tokens: float) -> float:
        """Bytes of weights that `steps` of single ranks read for `tokens` in all.

        Data-parallel ranks step together and share experts. Each rank reads its part of the experts
        that the tokens of all ranks use.
        """
        if self.model is None or steps <= 0:
            return 0.0
        ranks, each = self.parallelism.data, tokens / steps
        dense = step_weight_bytes(self.model, 0)
        experts = step_weight_bytes(self.model, each * ranks) - dense
        return steps * (dense + experts / ranks)
