"""MIG instances of a GPU, and its Xid errors."""

import itertools
from collections.abc import Sequence
from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest

from agent.catalog.gpu_problems import COUNTED_XIDS
from agent.sources.nvml.xid_events import XidErrors
from tests.sources.nvml.fake_driver import (
    MIB,
    Poll,
    Scenarios,
    ScriptedNvml,
    Seen,
    check,
    gpu_uuid,
    mig_uuid,
    poll,
)

INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, GPU_NOT_FOUND, UNKNOWN = 2, 3, 4, 28, 999


def test_each_instance_has_its_share(nvml: ScriptedNvml) -> None:
    nvml.driver.do("mig 0 3", f"set 0 memory_used {800 * MIB}", "activity 0 5 40")
    nvml.poll("process 0 compute 7 100")
    nvml.poll()
    instances = nvml.of(0).mig_instances
    assert [instance.uuid for instance in instances] == [mig_uuid(0, place) for place in range(3)]
    first = instances[0]
    assert (first.gpu_instance, first.compute_instance, first.gpu_slices) == (7, 0, 1)
    assert first.name == "NVIDIA H200 MIG 1g.18gb"
    assert first.facts["gpu_memory_used_bytes", ()] == 100 * MIB
    assert first.processes == {7: 100}
    assert [each.facts["gpu_tensor_active_ratio", ()] for each in instances] == [0.4] * 3


MODE, REGISTER = "nvmlDeviceGetMigMode", "nvmlDeviceRegisterEvents"
CREATE, TYPES = "nvmlEventSetCreate", "nvmlDeviceGetSupportedEventTypes"
FIRST, SECOND, THIRD = (mig_uuid(0, place) for place in range(3))

SCENARIOS: Scenarios = {
    "facts of the whole GPU are not an instance's": [
        poll("mig 0 1"),
        {"gpu_power_watts": 78, "gpu_utilization_ratio": None, "failures": []},
    ],
    "a GPU that cannot have MIG is asked once": [
        poll(f"answer 0 {MODE} {NOT_SUPPORTED}", times=30), {"instances": [], f"calls {MODE}": 1},
    ],
    "instances that come and go are noticed": [
        poll(), poll("mig 0 2", after_s=10), {"instances": [FIRST, SECOND]},
        poll("mig 0 1", after_s=10), {"instances": [FIRST]},
        poll("mig 0 0", after_s=10), {"instances": []},
    ],
    **{
        f"an instance that is taken away {when} does not cost the GPU": [
            poll("mig 0 2"), poll(f"loseinstance 0 0 {GPU_NOT_FOUND}", after_s=after_s),
            {"gpu_up": 1, "instances": [SECOND]},
            poll("loseinstance 0 0 0", after_s=10), {"instances": [SECOND, FIRST]},
        ]
        for when, after_s in (("between look-ups", 1), ("during a look-up", 10))
    },
    **{
        f"instances stay while {function} fails": [
            poll("mig 0 3"), poll(f"answer 0 {function} {UNKNOWN}", after_s=10),
            {"instances": [FIRST, SECOND, THIRD], "gpu_up": 1},
            poll(f"answer 0 {function} 0", "mig 0 2", after_s=10), {"instances": [FIRST, SECOND]},
        ]
        for function in (
            MODE, "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex",
            "nvmlDeviceGetComputeInstanceId",
        )
    },
    "an instance without ids is read once they are known": [
        poll("mig 0 1", f"answer 0 nvmlDeviceGetGpuInstanceId {UNKNOWN}"), {"instances": []},
        poll("answer 0 nvmlDeviceGetGpuInstanceId 0", after_s=10), {"instances": [FIRST]},
    ],
    **{
        f"Xids that are not supported are not counted, the rest is read: {script}": [
            poll(script), poll(),
            {f"gpu_xid_errors/{xid}": None for xid in COUNTED_XIDS},
            {"gpu_memory_used_bytes": 0, "failures": []},
        ]
        for script in (
            "set 0 events 0", f"answer -1 {CREATE} {NOT_SUPPORTED}",
            f"answer 0 {REGISTER} {NOT_SUPPORTED}", f"answer 0 {TYPES} {NOT_SUPPORTED}",
        )
    },
    **{
        f"a driver that does not know the event is not initialised again for {function}": [
            poll(f"answer -1 {function} {INVALID_ARGUMENT}", times=10),
            {"failures": [], "calls nvmlInitWithFlags": 1},
        ]
        for function in (REGISTER, CREATE, TYPES)
    },
}  # fmt: skip


@pytest.mark.parametrize("parts", SCENARIOS.values(), ids=SCENARIOS)
def test_instances_and_events_are_found_and_lost(
    nvml: ScriptedNvml, parts: Sequence[Poll | Seen]
) -> None:
    check(nvml, parts)
    nvml.source.close()
    assert nvml.driver.calls("nvmlGpmSampleFree") == nvml.driver.calls("nvmlGpmSampleAlloc")


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
    # It is known by its GPU even when that is lost.
    nvml.driver.do("xid 1 79 -1 -1", "lose 1 15")
    assert ((seen := nvml.next_xid()).gpu, seen.xid) == (gpu_uuid(1), 79)


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


def test_of_a_burst_the_newest_errors_wait_for_the_next_read() -> None:
    errors = XidErrors(lambda: 5.0)
    errors.count(["GPU-0"])
    before = errors.facts("GPU-0")
    for _ in range(1500):
        errors.add("GPU-0", 79, None, None)
    # What was read does not change under the reader.
    assert before["gpu_xid_errors", ("79",)] == 0
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
