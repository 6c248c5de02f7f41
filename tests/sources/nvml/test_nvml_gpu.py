"""MIG instances of a GPU, and its Xid errors."""

import itertools
from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest

from agent.catalog.gpu_problems import COUNTED_XIDS
from agent.sources.nvml.xid_events import XidErrors
from tests.sources.nvml.fake_driver import MIB, ScriptedNvml, gpu_uuid, mig_uuid

INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, GPU_NOT_FOUND, UNKNOWN = 2, 3, 4, 28, 999


def test_each_instance_has_its_share(nvml: ScriptedNvml) -> None:
    nvml.poll("mig 0 3", f"set 0 memory_used {800 * MIB}", "process 0 compute 7 100")
    instances = nvml.of(0).mig_instances
    assert [instance.uuid for instance in instances] == [mig_uuid(0, place) for place in range(3)]
    first = instances[0]
    assert (first.gpu_instance, first.compute_instance, first.gpu_slices) == (7, 0, 1)
    assert first.name == "NVIDIA H200 MIG 1g.18gb"
    assert first.facts["gpu_memory_used_bytes", ()] == 100 * MIB
    assert first.processes == {7: 100}


def test_an_instance_has_its_own_activity(nvml: ScriptedNvml) -> None:
    nvml.driver.do("mig 0 2", "activity 0 5 40")
    nvml.poll()
    nvml.poll()
    for instance in nvml.of(0).mig_instances:
        assert instance.facts["gpu_tensor_active_ratio", ()] == 0.4


def test_facts_of_the_whole_gpu_are_not_an_instances(nvml: ScriptedNvml) -> None:
    nvml.poll("mig 0 1")
    assert nvml.fact("gpu_power_watts") == 78
    assert nvml.fact("gpu_utilization_ratio") is None
    assert not nvml.failures


def test_a_gpu_that_cannot_have_mig_is_asked_once(nvml: ScriptedNvml) -> None:
    nvml.driver.do(f"answer 0 nvmlDeviceGetMigMode {NOT_SUPPORTED}")
    for _ in range(30):
        nvml.poll()
    assert nvml.of(0).mig_instances == ()
    assert nvml.driver.calls("nvmlDeviceGetMigMode") == 1


def test_instances_that_come_and_go_are_noticed(nvml: ScriptedNvml) -> None:
    nvml.poll()
    nvml.poll("mig 0 2", after_s=10)
    assert len(nvml.of(0).mig_instances) == 2
    nvml.poll("mig 0 1", after_s=10)
    assert [instance.uuid for instance in nvml.of(0).mig_instances] == [mig_uuid(0, 0)]
    nvml.poll("mig 0 0", after_s=10)
    assert nvml.of(0).mig_instances == ()
    nvml.source.close()
    assert nvml.driver.calls("nvmlGpmSampleFree") == nvml.driver.calls("nvmlGpmSampleAlloc")


@pytest.mark.parametrize("after_s", [1.0, 10.0], ids=["between look-ups", "during a look-up"])
def test_an_instance_that_is_taken_away_does_not_cost_the_gpu(
    nvml: ScriptedNvml, after_s: float
) -> None:
    nvml.poll("mig 0 2")
    nvml.poll(f"loseinstance 0 0 {GPU_NOT_FOUND}", after_s=after_s)
    assert nvml.fact("gpu_up") == 1
    assert [instance.uuid for instance in nvml.of(0).mig_instances] == [mig_uuid(0, 1)]
    nvml.poll("loseinstance 0 0 0", after_s=10)
    assert len(nvml.of(0).mig_instances) == 2
    nvml.source.close()
    assert nvml.driver.calls("nvmlGpmSampleFree") == nvml.driver.calls("nvmlGpmSampleAlloc")


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetMaxMigDeviceCount",
        "nvmlDeviceGetMigDeviceHandleByIndex",
        "nvmlDeviceGetComputeInstanceId",
    ],
)
def test_instances_stay_while_a_look_up_fails(nvml: ScriptedNvml, function: str) -> None:
    nvml.poll("mig 0 3")
    nvml.poll(f"answer 0 {function} {UNKNOWN}", after_s=10)
    assert [instance.compute_instance for instance in nvml.of(0).mig_instances] == [0] * 3
    assert nvml.fact("gpu_up") == 1
    nvml.poll(f"answer 0 {function} 0", "mig 0 2", after_s=10)
    assert len(nvml.of(0).mig_instances) == 2


def test_an_instance_without_ids_is_read_once_they_are_known(nvml: ScriptedNvml) -> None:
    nvml.poll("mig 0 1", f"answer 0 nvmlDeviceGetGpuInstanceId {UNKNOWN}")
    assert nvml.of(0).mig_instances == ()
    nvml.poll("answer 0 nvmlDeviceGetGpuInstanceId 0", after_s=10)
    assert [instance.gpu_instance for instance in nvml.of(0).mig_instances] == [7]


def test_an_instance_that_cannot_be_looked_up_does_not_hide_the_others(
    nvml: ScriptedNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = "nvmlDeviceGetMigDeviceHandleByIndex"
    look_up = getattr(pynvml, function)

    def failing_for_the_first(handle: Any, place: int) -> Any:
        if place == 0:
            raise pynvml.NVMLError(UNKNOWN)
        return look_up(handle, place)

    monkeypatch.setattr(pynvml, function, failing_for_the_first)
    nvml.poll("mig 0 3")
    uuids = [instance.uuid for instance in nvml.of(0).mig_instances]
    assert uuids == [mig_uuid(0, 1), mig_uuid(0, 2)]


def _slow_look_ups(nvml: ScriptedNvml, monkeypatch: pytest.MonkeyPatch, took_s: float) -> None:
    look_up = pynvml.nvmlDeviceGetMigDeviceHandleByIndex

    def slowly(handle: Any, place: int) -> Any:
        nvml.now += took_s
        return look_up(handle, place)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigDeviceHandleByIndex", slowly)


@pytest.mark.parametrize("took_s", [0.15, 0.6])
def test_slow_look_ups_lose_no_instance(
    nvml: ScriptedNvml, monkeypatch: pytest.MonkeyPatch, took_s: float
) -> None:
    nvml.driver.do("mig 0 3")
    nvml.poll()
    _slow_look_ups(nvml, monkeypatch, took_s)
    for _ in range(60):
        nvml.poll()
        assert len(nvml.of(0).mig_instances) == 3


@pytest.mark.parametrize("took_s", [0.15, 0.6])
def test_slow_look_ups_find_instances_one_by_one_and_delay_no_gpu(
    nvml: ScriptedNvml, monkeypatch: pytest.MonkeyPatch, took_s: float
) -> None:
    _slow_look_ups(nvml, monkeypatch, took_s)
    nvml.driver.do("mig 0 3")
    held_s = 0.0
    for _ in range(60):
        before = nvml.now
        nvml.poll()
        assert nvml.now - before < 1 + 2 * took_s
        held_s += nvml.now - before - 1
    assert len(nvml.of(0).mig_instances) == 3
    assert held_s < 60 / 10
    # What was taken away says so itself.
    nvml.poll(f"loseinstance 0 1 {GPU_NOT_FOUND}")
    assert len(nvml.of(0).mig_instances) == 2


def test_a_whole_gpu_that_is_forbidden_still_shows_its_instances(
    nvml: ScriptedNvml, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.poll(
        "mig 0 1",
        f"answer 0 nvmlDeviceGetFieldValues {NO_PERMISSION}",
        f"answer 0 nvmlDeviceGetTemperatureV {NO_PERMISSION}",
    )
    assert nvml.fact("gpu_energy_joules") is not None
    (instance,) = nvml.of(0).mig_instances
    assert instance.facts["gpu_memory_total_bytes", ()] == 143771 * MIB // 8
    assert caplog.text.count("administration") == 1


# Xid errors


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
