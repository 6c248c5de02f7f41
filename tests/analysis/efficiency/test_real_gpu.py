"""The hardware's MFU and MBU of a real H200, beside what PyTorch did on it by the clock."""

import json
from pathlib import Path
from typing import Any

import pytest

from agent.analysis.efficiency.disagreement import hardware_utilisation
from agent.catalog.hardware import Precision, recognise_gpu
from agent.records.gpu import GpuSample

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("h200.json").read_text())
PER_UNIT = 1e12
# The clock is one reading of a second in which it changes.
WITHIN = 0.05


def sample(row: dict[str, Any]) -> GpuSample:
    """The agent's sample after eight seconds of a load."""
    facts = {(name, tuple(labels)): float(value) for name, labels, value in keys(row)}
    return GpuSample(gpu="GPU-1", index=0, name=RECORDED["gpu"], at=0.0, facts=facts)


def keys(row: dict[str, Any]) -> list[tuple[str, list[str], float]]:
    """Names, labels and values of the facts in a row."""
    split = [(key.split("/"), value) for key, value in row["facts"].items()]
    return [(name, labels, value) for (name, *labels), value in split]


@pytest.mark.parametrize("row", RECORDED["rows"], ids=lambda row: row["load"])
def test_the_hardwares_figures_are_what_pytorch_did_by_the_clock(row: dict[str, Any]) -> None:
    gpu = sample(row)
    model = recognise_gpu(gpu.name, row["facts"]["gpu_memory_total_bytes"])
    assert model is not None
    seen = hardware_utilisation([gpu])
    if row["unit"] == "TFLOP/s":
        peak = model.peak_flops_per_s[Precision.BF16]
        assert seen.mfu == pytest.approx(PER_UNIT * row["achieved"] / peak, rel=WITHIN)
    else:
        share = PER_UNIT * row["achieved"] / model.bandwidth_bytes_per_s
        assert seen.mbu == pytest.approx(share, rel=WITHIN)
