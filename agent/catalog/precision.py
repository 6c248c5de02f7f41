"""The number formats in which GPUs multiply and models are kept."""

from enum import StrEnum


class Precision(StrEnum):
    """One number format. `bits` is its width."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT8 = "int8"
    FP4 = "fp4"

    @property
    def bits(self) -> int:
        """How many bits one number takes."""
        return _BITS[self]


_BITS = {
    Precision.FP32: 32,
    Precision.BF16: 16,
    Precision.FP16: 16,
    Precision.FP8: 8,
    Precision.INT8: 8,
    Precision.FP4: 4,
}
