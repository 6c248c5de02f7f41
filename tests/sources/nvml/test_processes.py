from collections.abc import Sequence

import pytest

from tests.sources.nvml.fake_driver import ScriptedNvml

NOT_SUPPORTED, NO_PERMISSION, UNKNOWN = 3, 4, 999
MPS_LIST = "nvmlDeviceGetMPSComputeRunningProcesses_v3"
COMPUTE_LIST = "nvmlDeviceGetComputeRunningProcesses_v3"


@pytest.mark.parametrize(
    ("script", "memory"),
    [
        ((), {}),
        (("process 0 compute 7 -1", "process 0 compute 8 5"), {7: None, 8: 5}),
        # In several slices.
        (("process 0 compute 7 10", "process 0 compute 7 20"), {7: 30}),
        (("process 0 compute 7 10", "process 0 mps 8 20", "process 0 mps 7 10"), {7: 10, 8: 20}),
        (("process 0 compute 7 10", f"answer 0 {MPS_LIST} {NOT_SUPPORTED}"), {7: 10}),
        (
            [f"process 0 compute {pid} {pid}" for pid in range(100, 120)],
            {pid: pid for pid in range(100, 120)},
        ),
    ],
)
def test_each_process_has_its_memory(
    nvml: ScriptedNvml, script: Sequence[str], memory: dict[int, int | None]
) -> None:
    nvml.poll(*script)
    assert nvml.of(0).processes == memory


@pytest.mark.parametrize(
    "script",
    [
        (f"answer 0 {COMPUTE_LIST} {NO_PERMISSION}",),
        (f"answer 0 {COMPUTE_LIST} {NO_PERMISSION}", f"answer 0 {MPS_LIST} {NOT_SUPPORTED}"),
        (f"answer 0 {COMPUTE_LIST} {UNKNOWN}",),
        (f"answer 0 {MPS_LIST} {UNKNOWN}",),
    ],
)
def test_processes_are_unknown_where_a_list_may_hold_more_and_not_none(
    nvml: ScriptedNvml, script: tuple[str, ...]
) -> None:
    nvml.poll(*script)
    assert nvml.of(0).processes is None


def test_a_list_that_always_fails_does_not_hide_the_other(nvml: ScriptedNvml) -> None:
    nvml.driver.do("process 0 compute 7 10", f"answer 0 {MPS_LIST} {UNKNOWN}")
    for _ in range(30):
        nvml.poll()
        assert nvml.of(0).processes == {7: 10}


def test_processes_are_unknown_while_a_list_that_was_read_before_fails(nvml: ScriptedNvml) -> None:
    nvml.poll("process 0 compute 7 10", "process 0 mps 8 20")
    nvml.poll(f"answer 0 {MPS_LIST} {UNKNOWN}", after_s=10)
    assert nvml.of(0).processes is None


def test_the_slow_lists_are_read_every_ten_seconds_and_repeated_in_between(
    nvml: ScriptedNvml,
) -> None:
    nvml.poll("process 0 compute 7 10")
    for _ in range(9):
        nvml.poll("process 0 compute 8 10")
        assert nvml.of(0).processes == {7: 10}
    nvml.poll()
    assert nvml.of(0).processes == {7: 10, 8: 90}


def test_a_gpu_that_cannot_be_read_has_unknown_processes(nvml: ScriptedNvml) -> None:
    nvml.poll("process 0 compute 7 10")
    nvml.poll("lose 0 15")
    assert nvml.of(0).processes is None
