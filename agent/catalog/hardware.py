"""Number formats, and the peak figures of GPU products: the rows of hardware.toml by name.

Peaks are dense. A GPU without a row is unknown: figures of a similar product would be a guess."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any


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


# If a GPU has no unit for the weights' precision, engines convert the weights to 16 bits first.
# They run in FP16 if a GPU has no BF16. FP32 is never converted: its peak is in no row.
_INSTEAD = (Precision.BF16, Precision.FP16)

# NVML's total is a little less than the data sheet's. A larger difference means another product
# under the same name, or a part of one.
_MEMORY_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """One GPU product, per GPU. `confidence` says how well its figures are documented.

    `units` are the precisions that it multiplies in, also those whose peak is unknown.
    """

    name: str
    nvml_names: tuple[str, ...] = ()
    confidence: str = "given"
    memory_bytes: int
    bandwidth_bytes_per_s: float
    peak_flops_per_s: Mapping[Precision, float]
    units: frozenset[Precision] = frozenset(Precision)

    def peak(self, precision: Precision) -> float | None:
        """Dense FLOP/s of products in this precision, or in 16 bits if it has no unit for it.

        None if the peak of that unit is unknown.
        """
        usable = (precision, *_INSTEAD)
        unit = next((each for each in usable if each in self.units), None)
        return None if unit is None else self.peak_flops_per_s.get(unit)


@cache
def gpu_models() -> tuple[GpuModel, ...]:
    """Every GPU of hardware.toml, in its order."""
    text = files("agent.catalog").joinpath("hardware.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    return tuple(_gpu_model(row, table["units"]) for row in table["gpu"])


def find_gpu(name: str, models: Iterable[GpuModel] | None = None) -> GpuModel | None:
    """The GPU by its short name (`H100-SXM`) or NVML's name; None if unknown."""
    wanted = _plain(name)
    for model in gpu_models() if models is None else models:
        if wanted in (_plain(candidate) for candidate in (model.name, *model.nvml_names)):
            return model
    return None


def recognise_gpu(nvml_name: str, memory_bytes: float | None = None) -> GpuModel | None:
    """The GPU by NVML's name; None if it is unknown or its memory is not the product's."""
    for model in gpu_models():
        if _plain(nvml_name) in map(_plain, model.nvml_names):
            return model if _same_memory(model, memory_bytes) else None
    return None


def _same_memory(model: GpuModel, memory_bytes: float | None) -> bool:
    if memory_bytes is None:
        return True
    return abs(memory_bytes - model.memory_bytes) <= _MEMORY_TOLERANCE * model.memory_bytes


def _plain(name: str) -> str:
    """The name without "NVIDIA", which older drivers leave out and newer ones write."""
    return name.strip().casefold().removeprefix("nvidia ")


def _gpu_model(row: Mapping[str, Any], units: Mapping[str, list[str]]) -> GpuModel:
    peaks = row["peak_flops_per_s"]
    return GpuModel(
        name=row["name"],
        nvml_names=tuple(row["nvml_names"]),
        confidence=row["confidence"],
        memory_bytes=row["memory_bytes"]["value"],
        bandwidth_bytes_per_s=row["bandwidth_bytes_per_s"]["value"],
        peak_flops_per_s={Precision(key): figure["value"] for key, figure in peaks.items()},
        units=frozenset(map(Precision, units[row["architecture"]])) | {Precision.FP32},
    )
