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


# What operators may say of how the weights of the layers, and the KV cache, are kept.
WEIGHT_DTYPES = ("bf16", "fp16", "fp32", "fp8", "int8", "int4", "fp4")
CACHE_DTYPES = (Precision.BF16.value, Precision.FP16.value, Precision.FP8.value)

_BITS = {
    Precision.FP32: 32,
    Precision.BF16: 16,
    Precision.FP16: 16,
    Precision.FP8: 8,
    Precision.INT8: 8,
    Precision.FP4: 4,
}
