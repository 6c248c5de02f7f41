"""Number formats: in which GPUs multiply, and in which weights and KV caches are stored."""

from enum import StrEnum


class Precision(StrEnum):
    """One number format of products."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT8 = "int8"
    FP4 = "fp4"

    @property
    def bits(self) -> int:
        """The bits of one number."""
        return _BITS[self]


_BITS = {
    Precision.FP32: 32,
    Precision.BF16: 16,
    Precision.FP16: 16,
    Precision.FP8: 8,
    Precision.INT8: 8,
    Precision.FP4: 4,
}


class WeightDtype(StrEnum):
    """How the weights of the layers can be configured to be stored and multiplied."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"
    FP4 = "fp4"


class CacheDtype(StrEnum):
    """How the KV cache can be configured to be stored."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
