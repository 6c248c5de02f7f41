from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest

from tests.sources.nvml.fake_driver import MIB, ScriptedNvml, mig_uuid

NO_PERMISSION, NOT_SUPPORTED, GPU_NOT_FOUND, UNKNOWN = 4, 3, 28, 999


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
