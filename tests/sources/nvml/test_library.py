"""The driver's library, found or missing, and calls that fail, rest or are never made."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest

from agent.sources.nvml.library import GpuCalls, Nvml, Rights
from agent.sources.nvml.source import NvmlSource
from tests.sources.nvml.fake_driver import FakeDriver, ScriptedNvml, gpu_uuid

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


INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NO_DATA, UNKNOWN = 2, 3, 4, 21, 999


class Ticking:
    """A clock that goes on by `step_s` whenever it is read."""

    def __init__(self) -> None:
        self.at = 0.0
        self.step_s = 0.0

    def __call__(self) -> float:
        self.at += self.step_s
        return self.at


class Asked:
    """The calls of the scripted driver's only GPU, outside of any source."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.clock = Ticking()
        self.failures: list[str] = []
        pynvml.nvmlInit()
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.calls = GpuCalls(
            Nvml(pynvml, Rights(), self.clock, self.failures.append), "GPU-under-test"
        )

    def power(self) -> float | None:
        return self.calls.ask("nvmlDeviceGetPowerUsage", self.handle)

    @property
    def asked(self) -> int:
        return self.driver.calls("nvmlDeviceGetPowerUsage")


@pytest.fixture
def asked(driver: FakeDriver) -> Iterator[Asked]:
    yield Asked(driver)
    pynvml.nvmlShutdown()


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, 13, 25, 26])
def test_a_call_that_can_never_answer_is_asked_once(asked: Asked, code: int) -> None:
    asked.driver.do(f"answer 0 nvmlDeviceGetPowerUsage {code}")
    for _ in range(3):
        assert asked.power() is None
        asked.clock.at += 1000
    assert asked.asked == 1
    assert not asked.failures


@pytest.mark.parametrize("code", [UNKNOWN, INVALID_ARGUMENT])
def test_a_call_that_fails_is_counted_and_rests(asked: Asked, code: int) -> None:
    asked.driver.do(f"answer 0 nvmlDeviceGetPowerUsage {code}")
    assert asked.power() is None
    asked.driver.do("answer 0 nvmlDeviceGetPowerUsage 0")
    asked.clock.at += 9
    assert asked.power() is None
    assert asked.asked == 1
    asked.clock.at += 2
    assert asked.power() == 78000
    assert asked.failures == ["call_failed"]
    # It is not silent when nothing is due.
    asked.calls.begin()
    assert not asked.calls.silent


def test_a_call_that_never_knew_its_argument_is_left_out(asked: Asked) -> None:
    asked.driver.do(f"answer 0 nvmlDeviceGetPowerUsage {INVALID_ARGUMENT}")
    for _ in range(60):
        assert asked.power() is None
        asked.clock.at += 10.5
    assert asked.failures == ["call_failed"] * asked.asked == ["call_failed"] * 5
    assert not asked.calls.in_doubt("nvmlDeviceGetPowerUsage")


def test_a_call_that_knew_its_argument_once_is_asked_for_ever(asked: Asked) -> None:
    asked.power()
    for code in [INVALID_ARGUMENT] * 10 + [0]:
        asked.driver.do(f"answer 0 nvmlDeviceGetPowerUsage {code}")
        asked.clock.at += 10.5
        watts = asked.power()
    assert watts == 78000


def test_a_slow_call_answers_and_then_rests_for_many_times_its_length(
    asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    asked.clock.step_s = 0.5
    assert asked.power() == 78000
    asked.clock.step_s = 0
    assert asked.failures == ["call_slow"]
    assert "nvmlDeviceGetPowerUsage took 0.50 s" in caplog.text
    asked.clock.at += 9
    assert asked.power() is None
    assert asked.asked == 1
    # For half a minute at most.
    asked.clock.at += 2
    asked.clock.step_s = 60
    assert asked.power() == 78000
    asked.clock.step_s = 0
    asked.clock.at += 31
    assert asked.power() == 78000


def test_a_gpu_is_not_silent_when_one_call_fails_while_slow_ones_rest(asked: Asked) -> None:
    asked.clock.step_s = 0.5
    asked.power()
    asked.clock.step_s = 0
    asked.driver.do(f"answer 0 nvmlDeviceGetName {UNKNOWN}")
    for _ in range(2):
        asked.calls.begin()
        asked.power()
        asked.calls.ask("nvmlDeviceGetName", asked.handle)
        assert not asked.calls.silent


def test_nothing_is_in_doubt_while_a_call_fails_or_rests_and_not_when_it_says_no(
    asked: Asked,
) -> None:
    call = "nvmlDeviceGetPowerUsage"
    asked.driver.do(f"answer 0 {call} {UNKNOWN}")
    assert asked.power() is None
    assert asked.calls.in_doubt(call)
    asked.clock.at += 11
    asked.driver.do(f"answer 0 {call} {NO_DATA}")
    assert asked.power() is None
    assert not asked.calls.in_doubt(call)
    assert asked.calls.ask("nvmlDeviceGetSomethingThatLeft", asked.handle) is None
    assert asked.failures == ["call_failed"]
    asked.driver.do(f"answer 0 {call} 0")
    asked.clock.step_s = 0.5
    asked.power()
    asked.clock.step_s = 0
    assert asked.power() is None
    assert asked.calls.in_doubt(call)


def test_one_call_of_two_kinds_is_switched_off_by_kind(asked: Asked) -> None:
    clock = ("nvmlDeviceGetClockInfo", asked.handle)
    assert asked.calls.ask(*clock, pynvml.NVML_CLOCK_VIDEO, variant="video") is None
    assert asked.calls.ask(*clock, pynvml.NVML_CLOCK_SM, variant="sm") == 345


def test_a_call_that_one_gpu_has_not_is_still_asked_of_the_others(nvml: ScriptedNvml) -> None:
    nvml.driver.do("gpus 2", f"answer 0 nvmlDeviceGetUtilizationRates {NOT_SUPPORTED}")
    nvml.poll()
    nvml.poll()
    assert nvml.driver.calls("nvmlDeviceGetUtilizationRates") == 1 + 2
    assert nvml.fact("gpu_utilization_ratio", index=0) is None
    assert nvml.fact("gpu_utilization_ratio", index=1) == 0


def test_a_missing_right_is_named_once_whatever_misses_it(
    nvml: ScriptedNvml, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.driver.do(
        "gpus 8",
        f"answer -1 nvmlGpmSampleGet {NO_PERMISSION}",
        f"answer -1 nvmlDeviceGetUtilizationRates {NO_PERMISSION}",
        f"answer -1 nvmlDeviceGetCurrentClocksEventReasons {NO_PERMISSION}",
    )
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            nvml.poll()
    assert len([line for line in caplog.messages if "GPU profiling" in line]) == 1
    assert len([line for line in caplog.messages if "administration" in line]) == 1
    assert len(caplog.messages) == 2
    assert not nvml.failures
    assert nvml.fact("gpu_sm_active_ratio") is None
    assert nvml.fact("gpu_memory_used_bytes") == 0


def test_a_slow_call_of_one_gpu_leaves_the_rest_of_the_read_as_it_was(driver: FakeDriver) -> None:
    driver.do("gpus 2", "slow 0 nvmlDeviceGetUtilizationRates 150")
    source = NvmlSource(event_wait_ms=20)
    reads = [source.read(1.0), source.read(2.0)]
    source.close()
    samples = [sample for read in reads for sample in read.samples]
    assert [sample.fact("gpu_utilization_ratio") for sample in samples] == [0, 0, None, 0]
    assert all(sample.fact("gpu_memory_used_bytes") == 0 for sample in samples)
    assert [read.failures for read in reads] == [("call_slow",), ()]
