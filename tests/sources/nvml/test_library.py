import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.sources.nvml.fake_driver import FILE_NAME, gpu_uuid

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Polled:
    """The result of two reads in a process of its own, with its libraries in a folder."""

    samples: list[Any]
    failures: list[str]
    log: str


def _polled(folder: Path, *, path: str = "", gpus: int = 1) -> Polled:
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder),
        "STANDIN_GPUS": str(gpus),
        "PYTHONPATH": path,
    }
    command = [sys.executable, "-m", "tests.sources.nvml.read_twice"]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return Polled(**json.loads(done.stdout), log=done.stderr)


def _facts(sample: Any) -> dict[str, float]:
    return {"/".join([name, *labels]): value for name, labels, value in sample["facts"]}


def test_the_binding_finds_the_drivers_library(library: Path) -> None:
    polled = _polled(library.parent, gpus=8)
    assert [sample["gpu"] for sample in polled.samples[:8]] == [gpu_uuid(i) for i in range(8)]
    assert not polled.failures
    assert not polled.log


def test_calls_that_an_old_driver_lacks_are_left_out_or_stood_in_for(old_library: Path) -> None:
    polled = _polled(old_library.parent)
    facts = _facts(polled.samples[-1])
    assert facts["gpu_temperature_celsius/gpu"] == 32
    assert facts["gpu_power_watts"] == 78
    assert facts["gpu_throttle_active/idle"] == 1
    assert facts["gpu_memory_total_bytes"] > facts["gpu_memory_free_bytes"]
    missing = ("gpu_memory_used_bytes", "gpu_sm_active_ratio", "gpu_pcie_transmitted_bytes")
    assert not facts.keys() & set(missing)
    assert not polled.failures
    assert not polled.log


def test_without_the_library_the_agent_goes_on_and_says_so(tmp_path: Path) -> None:
    # A file that is no library, so that a real one elsewhere is not found either.
    (tmp_path / FILE_NAME).touch()
    polled = _polled(tmp_path)
    assert polled.failures == ["no_library"] * 2
    assert not polled.samples
    assert "the agent goes on without" in polled.log
    assert polled.log.count("libnvidia-ml.so.1") == 1


@pytest.mark.parametrize(
    ("module", "reason", "said"),
    [
        ("raise ImportError('not installed')", "no_package", "nvidia-ml-py is not installed"),
        # The abandoned package of that name.
        ("class NVMLError(Exception): ...", "wrong_package", "the module pynvml at {file}"),
    ],
)
def test_without_the_python_package_the_agent_goes_on_and_says_so(
    tmp_path: Path, library: Path, module: str, reason: str, said: str
) -> None:
    file = tmp_path / "pynvml.py"
    file.write_text(module)
    polled = _polled(library.parent, path=str(tmp_path))
    assert polled.failures == [reason] * 2
    assert said.format(file=file) in polled.log
