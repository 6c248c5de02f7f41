"""What serves: a model on its GPUs, and what work requests and steps are to it."""

from dataclasses import dataclass, field
from enum import StrEnum

from agent.analysis.physics.coefficients import Coefficients, coefficients
from agent.analysis.physics.flops import decode_flops, prefill_flops
from agent.analysis.physics.roofline import Roof
from agent.analysis.physics.traffic import decode_kv_bytes, prefill_kv_bytes, step_weight_bytes
from agent.catalog.hardware import GpuModel
from agent.records.model import ModelShape, Parallelism, Work

_NO_WORK = Work(0.0, 0.0)


class Role(StrEnum):
    """Which phase of a request an engine does; with prefill and decode apart, one each."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A model spread over GPUs; either is None where it is not known."""

    model: ModelShape | None = None
    gpu: GpuModel | None = None
    parallelism: Parallelism = field(default_factory=Parallelism)
    role: Role = Role.BOTH
    sums: Coefficients | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sums = None if self.model is None else coefficients(self.model)
        object.__setattr__(self, "sums", sums)

    @property
    def peak_flops_per_s(self) -> float | None:
        """The dense peak of all GPUs together, in the precision of the model's products."""
        peak = self._gpu_peak()
        return None if peak is None else peak * self.parallelism.gpus

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """What the memory of all GPUs together can deliver."""
        if self.gpu is None:
            return None
        return self.gpu.bandwidth_bytes_per_s * self.parallelism.gpus

    @property
    def roof(self) -> Roof | None:
        """Both at once; None where either is unknown."""
        peak, bandwidth = self.peak_flops_per_s, self.bandwidth_bytes_per_s
        return None if peak is None or bandwidth is None else Roof(peak, bandwidth)

    def _gpu_peak(self) -> float | None:
        if self.gpu is None or self.model is None:
            return None
        return self.gpu.peak(self.model.compute)

    def prefill(self, new: int, cached: int) -> Work:
        """Work of a prompt's `new` tokens after `cached` ones, without weights; 0 if no model."""
        if self.sums is None:
            return _NO_WORK
        return Work(
            prefill_flops(self.sums, new + cached, cached),
            prefill_kv_bytes(self.sums, new, cached, self.parallelism.tensor),
        )

    def decode(self, prompt: int, output: int) -> Work:
        """Work of all output tokens but the first, without weights; 0 if no model."""
        if self.sums is None:
            return _NO_WORK
        return Work(
            decode_flops(self.sums, prompt, output),
            decode_kv_bytes(self.sums, prompt, output, self.parallelism.tensor),
        )

    def weight_bytes(self, steps: float, tokens: float) -> float:
        """Bytes of weights that so many steps of single ranks read, over so many tokens in all.

        Data-parallel ranks step together and share experts: each reads its part of those that the
        tokens of all of them use.
        """
        if self.model is None or steps <= 0:
            return 0.0
        ranks, each = self.parallelism.data, tokens / steps
        dense = step_weight_bytes(self.model, 0)
        experts = step_weight_bytes(self.model, each * ranks) - dense
        return steps * (dense + experts / ranks)
