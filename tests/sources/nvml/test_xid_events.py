import itertools

import pytest

from agent.catalog.gpu_problems import COUNTED_XIDS
from agent.sources.nvml.xid_events import XidErrors
from tests.sources.nvml.fake_driver import ScriptedNvml, gpu_uuid

INVALID_ARGUMENT, NOT_SUPPORTED, UNKNOWN = 2, 3, 999


def test_an_xid_between_two_reads_is_returned_by_the_next(nvml: ScriptedNvml) -> None:
    nvml.driver.do("gpus 2")
    nvml.poll()
    nvml.driver.do("xid 1 48 -1 -1")
    seen = nvml.next_xid()
    assert (seen.gpu, seen.xid, seen.count, seen.at) == (gpu_uuid(1), 48, 1, nvml.now)
    assert (seen.gpu_instance, seen.compute_instance) == (None, None)
    nvml.poll()
    assert not nvml.xids


def test_each_xid_is_counted_for_its_gpu_with_the_time_of_the_last(nvml: ScriptedNvml) -> None:
    nvml.driver.do("gpus 2")
    nvml.poll()
    for count in (1, 2):
        nvml.driver.do("xid 0 94 -1 -1")
        assert nvml.next_xid().count == count
        nvml.poll()
    assert nvml.fact("gpu_xid_errors", "94", index=0) == 2
    assert nvml.fact("gpu_xid_last_seen_timestamp_seconds", "94", index=0) == nvml.now - 1
    assert nvml.fact("gpu_xid_errors", "94", index=1) is None


def test_an_xid_of_a_slice_names_the_slice(nvml: ScriptedNvml) -> None:
    nvml.poll("mig 0 2")
    nvml.driver.do("xid 0 13 8 0")
    seen = nvml.next_xid()
    assert (seen.gpu_instance, seen.compute_instance) == (8, 0)


def test_an_xid_is_known_by_its_gpu_even_when_that_is_lost(nvml: ScriptedNvml) -> None:
    nvml.driver.do("gpus 2")
    nvml.poll()
    nvml.driver.do("xid 1 79 -1 -1", "lose 1 15")
    assert (seen := nvml.next_xid()).gpu == gpu_uuid(1)
    assert seen.xid == 79


@pytest.mark.parametrize(
    "script",
    [
        ("set 0 events 0",),
        (f"answer -1 nvmlEventSetCreate {NOT_SUPPORTED}",),
        (f"answer 0 nvmlDeviceRegisterEvents {NOT_SUPPORTED}",),
        (f"answer 0 nvmlDeviceGetSupportedEventTypes {NOT_SUPPORTED}",),
    ],
    ids=lambda script: script[0],
)
def test_where_xids_are_not_supported_their_count_is_unknown_and_the_rest_is_read(
    nvml: ScriptedNvml, script: tuple[str, ...]
) -> None:
    nvml.poll(*script)
    nvml.poll()
    assert all(nvml.fact("gpu_xid_errors", str(xid)) is None for xid in COUNTED_XIDS)
    assert nvml.fact("gpu_memory_used_bytes") == 0
    assert not nvml.failures


@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceRegisterEvents", "nvmlEventSetCreate", "nvmlDeviceGetSupportedEventTypes"],
)
def test_a_gpu_whose_events_failed_is_reported_and_registered_soon(
    nvml: ScriptedNvml, function: str
) -> None:
    nvml.poll(f"answer -1 {function} {UNKNOWN}")
    assert "events_lost" in nvml.failures
    assert nvml.fact("gpu_up") == 1
    nvml.poll(f"answer -1 {function} 0")
    assert not nvml.failures
    nvml.driver.do("xid 0 79 -1 -1")
    assert nvml.next_xid().xid == 79


@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceRegisterEvents", "nvmlEventSetCreate", "nvmlDeviceGetSupportedEventTypes"],
)
def test_a_driver_that_does_not_know_the_event_is_not_initialised_again_for_it(
    nvml: ScriptedNvml, function: str
) -> None:
    nvml.driver.do(f"answer -1 {function} {INVALID_ARGUMENT}")
    for _ in range(10):
        nvml.poll()
    assert not nvml.failures
    assert nvml.driver.calls("nvmlInitWithFlags") == 1


def test_an_xid_that_cannot_be_counted_does_not_end_the_listening(
    nvml: ScriptedNvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add = XidErrors.add

    def failing(errors: XidErrors, gpu: str, xid: int, *instances: int | None) -> None:
        if xid == 31:
            raise ValueError("broken")
        add(errors, gpu, xid, *instances)

    monkeypatch.setattr(XidErrors, "add", failing)
    nvml.poll()
    nvml.driver.do("xid 0 31 -1 -1", "xid 0 45 -1 -1")
    assert nvml.next_xid().xid == 45
    assert "Xid 31" in caplog.text


# Counts


def test_facts_that_were_read_do_not_change_under_the_reader() -> None:
    errors = XidErrors(lambda: 5.0)
    errors.count(["GPU-0"])
    before = errors.facts("GPU-0")
    errors.add("GPU-0", 79, None, None)
    assert before["gpu_xid_errors", ("79",)] == 0


def test_of_a_burst_the_newest_errors_wait_for_the_next_read() -> None:
    errors = XidErrors(lambda: 5.0)
    for _ in range(1500):
        errors.add("GPU-0", 79, None, None)
    assert [xid.count for xid in errors.take()] == list(range(501, 1501))


def test_a_burst_of_one_gpu_drops_no_error_of_another() -> None:
    moments = itertools.count()
    errors = XidErrors(lambda: float(next(moments)))
    for gpu in ("GPU-0", "GPU-1", *["GPU-0"] * 1500):
        errors.add(gpu, 79, None, None)
    taken = errors.take()
    assert (len(taken), taken[0].gpu) == (1001, "GPU-1")
    assert [xid.at for xid in taken] == sorted(xid.at for xid in taken)
    assert errors.take() == ()
