import pytest

from tests.sources.nvml.watched import Watched

NOT_SUPPORTED, NO_PERMISSION, UNKNOWN = 3, 4, 999
MPS_LIST = "nvmlDeviceGetMPSComputeRunningProcesses_v3"
COMPUTE_LIST = "nvmlDeviceGetComputeRunningProcesses_v3"


def test_each_process_has_its_memory(watched: Watched) -> None:
    watched.poll(*(f"process 0 compute {pid} {pid * 1000}" for pid in range(100, 120)))
    assert watched.of(0).processes == {pid: pid * 1000 for pid in range(100, 120)}


def test_a_gpu_without_processes_has_none_which_is_not_unknown(watched: Watched) -> None:
    watched.poll()
    assert watched.of(0).processes == {}


def test_memory_that_the_driver_withholds_is_unknown(watched: Watched) -> None:
    watched.poll("process 0 compute 7 -1", "process 0 compute 8 5")
    assert watched.of(0).processes == {7: None, 8: 5}


def test_a_process_in_several_slices_holds_their_sum(watched: Watched) -> None:
    watched.poll("process 0 compute 7 10", "process 0 compute 7 20")
    assert watched.of(0).processes == {7: 30}


def test_clients_of_the_multi_process_service_are_there_too(watched: Watched) -> None:
    watched.poll("process 0 compute 7 10", "process 0 mps 8 20", "process 0 mps 7 10")
    assert watched.of(0).processes == {7: 10, 8: 20}


def test_the_list_that_a_driver_has_not_does_not_hide_the_other(watched: Watched) -> None:
    watched.poll("process 0 compute 7 10", f"answer 0 {MPS_LIST} {NOT_SUPPORTED}")
    assert watched.of(0).processes == {7: 10}


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
    watched: Watched, script: tuple[str, ...]
) -> None:
    watched.poll(*script)
    assert watched.of(0).processes is None


def test_a_list_that_always_fails_does_not_hide_the_other(watched: Watched) -> None:
    watched.driver.do("process 0 compute 7 10", f"answer 0 {MPS_LIST} {UNKNOWN}")
    for _ in range(30):
        watched.poll()
        assert watched.of(0).processes == {7: 10}


def test_processes_are_unknown_while_a_list_that_was_told_fails(watched: Watched) -> None:
    watched.poll("process 0 compute 7 10", "process 0 mps 8 20")
    watched.poll(f"answer 0 {MPS_LIST} {UNKNOWN}", after_s=10)
    assert watched.of(0).processes is None


def test_the_slow_lists_are_read_every_ten_seconds_and_told_in_between(watched: Watched) -> None:
    watched.poll("process 0 compute 7 10")
    for _ in range(9):
        watched.poll("process 0 compute 8 10")
        assert watched.of(0).processes == {7: 10}
    watched.poll()
    assert watched.of(0).processes == {7: 10, 8: 90}


def test_a_gpu_that_cannot_be_read_has_unknown_processes(watched: Watched) -> None:
    watched.poll("process 0 compute 7 10")
    watched.poll("lose 0 15")
    assert watched.of(0).processes is None
