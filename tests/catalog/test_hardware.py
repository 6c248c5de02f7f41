"""The peak figures of GPU products, and the lookup of a GPU by its name."""

import tomllib
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest

from agent.catalog.hardware import GpuModel, Precision, find_gpu, gpu_models, recognise_gpu

MIB = 2**20

TABLE: dict[str, Any] = tomllib.loads(
    files("agent.catalog").joinpath("hardware.toml").read_text(encoding="utf-8")
)

every_gpu = pytest.mark.parametrize("gpu", gpu_models(), ids=lambda gpu: gpu.name)


def gpu_named(name: str) -> GpuModel:
    found = find_gpu(name)
    assert found is not None
    return found


def figures_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Each figure of a GPU in the table, with its sources."""
    own = [row[key] for key in ("memory_bytes", "bandwidth_bytes_per_s", "tdp_watts")]
    return [*own, *row["peak_flops_per_s"].values()]


@pytest.mark.parametrize("row", TABLE["gpu"], ids=lambda row: row["name"])
def test_every_figure_has_its_sources(row: dict[str, Any]) -> None:
    for figure in figures_of(row):
        assert figure["from"]
        assert set(figure["from"]) <= TABLE["sources"].keys()
    assert row["confidence"] in {"high", "medium", "low"}
    assert 70 <= row["tdp_watts"]["value"] <= 1400


@every_gpu
def test_peaks_are_dense_and_double_when_the_width_halves(gpu: GpuModel) -> None:
    peaks = gpu.peak_flops_per_s
    if Precision.FP8 in peaks:
        assert peaks[Precision.FP8] == pytest.approx(2 * peaks[Precision.FP16], rel=0.02)
    if Precision.BF16 in peaks:
        assert peaks[Precision.BF16] == peaks[Precision.FP16]


def test_each_unit_of_an_architecture_has_a_figure_and_no_other_has() -> None:
    for gpu in gpu_models():
        assert gpu.units - {Precision.FP32} == gpu.peak_flops_per_s.keys(), gpu.name


@pytest.mark.parametrize(
    ("gpu", "precision", "gpus", "sparse_pflops", "dense_pflops"),
    [
        # NVIDIA's pages of HGX B300 (8 GPUs) and GB300 NVL72: FP4 sparse | dense, others sparse.
        ("B300", Precision.FP4, 8, 144, 108),
        ("B300", Precision.FP8, 8, 72, 36),
        ("B300", Precision.BF16, 8, 36, 18),
        ("GB300", Precision.FP4, 72, 1440, 1080),
        ("GB300", Precision.FP8, 72, 720, 360),
        # NVIDIA's data sheets of one card, all sparse; AMD's, all dense.
        ("L40", Precision.BF16, 1, 0.3621, 0.18105),
        ("A40", Precision.BF16, 1, 0.2994, 0.1497),
        ("A30", Precision.BF16, 1, 0.330, 0.165),
        ("H800-SXM", Precision.FP8, 1, 3.958, 1.979),
        ("GH200-96GB", Precision.BF16, 1, 1.979, 0.9895),
        ("RTX-3090", Precision.FP16, 1, 0.142, 0.071),
        ("RTX-PRO-6000-Workstation", Precision.FP4, 1, 4.0, 2.0),
        ("RTX-PRO-6000-Max-Q", Precision.FP4, 1, 3.511, 1.7555),
        ("MI355X", Precision.FP4, 1, None, 10.1),
        ("MI355X", Precision.BF16, 1, None, 2.5),
        ("MI350X", Precision.FP8, 1, None, 4.6),
    ],
)
def test_peaks_are_what_the_vendors_publish_for_dense_products(
    gpu: str, precision: Precision, gpus: int, sparse_pflops: float | None, dense_pflops: float
) -> None:
    peak = gpu_named(gpu).peak(precision)
    assert peak is not None
    assert peak * gpus / 1e15 == pytest.approx(dense_pflops, rel=0.01)
    if sparse_pflops is not None:
        assert peak * gpus / 1e15 <= 0.76 * sparse_pflops


@pytest.mark.parametrize("unit", [Precision.FP4, Precision.FP8, Precision.INT8])
def test_a_unit_without_a_figure_is_unknown_and_never_another_units(unit: Precision) -> None:
    b300 = gpu_named("B300")
    others = {key: peak for key, peak in b300.peak_flops_per_s.items() if key is not unit}
    assert replace(b300, peak_flops_per_s=others).peak(unit) is None


@every_gpu
def test_figures_are_of_one_gpu_in_base_units(gpu: GpuModel) -> None:
    assert 14e9 < gpu.memory_bytes < 310e9
    assert 0.29e12 < gpu.bandwidth_bytes_per_s <= 8e12
    assert all(60e12 < peak <= 15e15 for peak in gpu.peak_flops_per_s.values())


def test_no_two_gpus_share_a_name() -> None:
    for gpu in gpu_models():
        for name in (gpu.name, *gpu.nvml_names):
            assert find_gpu(name) is gpu
        assert all(recognise_gpu(name) is gpu for name in gpu.nvml_names)


@pytest.mark.parametrize(
    ("nvml_name", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("A100-SXM4-40GB", "A100-40GB-SXM"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("Tesla T4", "T4"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX-PRO-6000-Max-Q"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
    ],
)
def test_a_gpu_is_found_by_its_nvml_name(nvml_name: str, gpu: str) -> None:
    recognised = recognise_gpu(nvml_name)
    assert recognised is not None
    assert recognised.name == gpu


@pytest.mark.parametrize(
    "nvml_name",
    [
        "NVIDIA H20-3e",
        "NVIDIA A800-SXM4-40GB",
        "NVIDIA L20",
        "NVIDIA L40G",
        "NVIDIA A30X",
        "NVIDIA GH200 144G HBM3e",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "",
    ],
)
def test_a_gpu_without_a_row_is_unknown_although_its_name_is_similar(nvml_name: str) -> None:
    assert recognise_gpu(nvml_name) is None


def test_a_name_with_another_memory_is_another_product() -> None:
    assert recognise_gpu("NVIDIA H100 80GB HBM3", 81559 * MIB) is gpu_named("H100-SXM")
    assert recognise_gpu("NVIDIA H100 80GB HBM3", 95830 * MIB) is None
    assert recognise_gpu("NVIDIA H200", 141e9) is gpu_named("H200-SXM")


def test_a_configured_name_may_be_in_lower_case_or_without_the_vendor() -> None:
    assert (
        gpu_named("h100-sxm") is gpu_named("NVIDIA H100 80GB HBM3") is gpu_named("H100 80GB HBM3")
    )
    assert find_gpu("H100") is None


@pytest.mark.parametrize(
    ("gpu", "precision", "peak"),
    [
        ("H100-SXM", Precision.FP8, 1978.9e12),
        ("A100-80GB-SXM", Precision.FP8, 312e12),
        ("H100-SXM", Precision.FP4, 989.4e12),
        ("T4", Precision.BF16, 65e12),
        ("V100-SXM2-16GB", Precision.INT8, 125e12),
        ("H100-SXM", Precision.FP32, None),
    ],
)
def test_precisions_without_hardware_support_use_the_16_bit_peak(
    gpu: str, precision: Precision, peak: float | None
) -> None:
    assert gpu_named(gpu).peak(precision) == peak
