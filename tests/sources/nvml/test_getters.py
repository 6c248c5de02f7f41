import pytest

from agent.catalog.gpu_facts import THROTTLE_REASONS
from tests.sources.nvml.fake_driver import MIB, ScriptedNvml

NOT_SUPPORTED, NO_PERMISSION = 3, 4


def test_memory_that_the_driver_reserves_is_not_used_memory(nvml: ScriptedNvml) -> None:
    nvml.poll(f"set 0 memory_used {1000 * MIB}")
    assert nvml.fact("gpu_memory_total_bytes") == 143771 * MIB
    assert nvml.fact("gpu_memory_reserved_bytes") == 614 * MIB
    assert nvml.fact("gpu_memory_used_bytes") == 1000 * MIB
    assert nvml.fact("gpu_memory_free_bytes") == (143771 - 614 - 1000) * MIB


def test_the_first_version_of_the_memory_call_gives_only_facts_that_mean_the_same(
    nvml: ScriptedNvml,
) -> None:
    nvml.poll(f"answer 0 nvmlDeviceGetMemoryInfo_v2 {NOT_SUPPORTED}")
    assert nvml.fact("gpu_memory_total_bytes") == 143771 * MIB
    assert nvml.fact("gpu_memory_free_bytes") == (143771 - 614) * MIB
    assert nvml.fact("gpu_memory_used_bytes") is None


def test_memory_that_is_forbidden_is_unknown_and_not_zero(nvml: ScriptedNvml) -> None:
    nvml.poll(
        f"answer 0 nvmlDeviceGetMemoryInfo_v2 {NO_PERMISSION}",
        f"answer 0 nvmlDeviceGetMemoryInfo {NO_PERMISSION}",
    )
    assert nvml.fact("gpu_memory_used_bytes") is None
    assert nvml.fact("gpu_memory_total_bytes") is None
    assert nvml.fact("gpu_up") == 1


@pytest.mark.parametrize(
    ("line", "name", "labels", "value"),
    [
        ("set 0 utilization 87", "gpu_utilization_ratio", (), 0.87),
        ("set 0 memory_busy 12", "gpu_memory_busy_ratio", (), 0.12),
        ("set 0 sm_clock 1755", "gpu_clock_hertz", ("sm",), 1.755e9),
        ("set 0 sm_clock 1755", "gpu_clock_hertz", ("memory",), 3.201e9),
        ("set 0 sm_clock 1755", "gpu_clock_max_hertz", ("sm",), 1.98e9),
        ("set 0 sm_clock 1755", "gpu_clock_max_hertz", ("memory",), 3.201e9),
        ("set 0 persistence 0", "gpu_persistence_mode", (), 0),
        ("set 0 persistence 1", "gpu_persistence_mode", (), 1),
    ],
)
def test_facts_are_ratios_and_base_units(
    nvml: ScriptedNvml, line: str, name: str, labels: tuple[str, ...], value: float
) -> None:
    nvml.poll(line)
    assert nvml.fact(name, *labels) == value


def test_the_new_temperature_call_is_enough_where_there_is_one(nvml: ScriptedNvml) -> None:
    nvml.poll("set 0 temperature 71")
    assert nvml.fact("gpu_temperature_celsius", "gpu") == 71
    assert nvml.driver.calls("nvmlDeviceGetTemperature") == 0


def test_the_old_temperature_call_replaces_the_new(nvml: ScriptedNvml) -> None:
    nvml.driver.do(f"answer 0 nvmlDeviceGetTemperatureV {NOT_SUPPORTED}")
    for celsius in (40, 41):
        nvml.poll(f"set 0 temperature {celsius}")
        assert nvml.fact("gpu_temperature_celsius", "gpu") == celsius
    assert nvml.driver.calls("nvmlDeviceGetTemperatureV") == 1


@pytest.mark.parametrize(("bit", "reason"), THROTTLE_REASONS.items())
def test_each_reason_for_throttling_has_its_own_bit(
    nvml: ScriptedNvml, bit: int, reason: str
) -> None:
    nvml.poll(f"set 0 throttle {bit}")
    active = {
        labelled: nvml.fact("gpu_throttle_active", labelled)
        for labelled in THROTTLE_REASONS.values()
    }
    assert active == {labelled: float(labelled == reason) for labelled in THROTTLE_REASONS.values()}


def test_reasons_that_a_gpu_does_not_support_are_unknown(nvml: ScriptedNvml) -> None:
    nvml.poll(f"set 0 throttle_known {0x4 | 0x40}")
    labelled = {labels for name, labels in nvml.of(0).facts if name == "gpu_throttle_active"}
    assert labelled == {("sw_power_cap",), ("hw_thermal",)}


def test_the_old_name_of_the_reasons_replaces_the_new(nvml: ScriptedNvml) -> None:
    nvml.driver.do(f"answer 0 nvmlDeviceGetCurrentClocksEventReasons {NOT_SUPPORTED}")
    for bit in (0x4, 0x40):
        nvml.poll(f"set 0 throttle {bit}")
        assert nvml.fact("gpu_throttle_active", THROTTLE_REASONS[bit]) == 1
    assert nvml.driver.calls("nvmlDeviceGetCurrentClocksEventReasons") == 1


def test_limits_and_maxima_are_read_rarely_and_are_in_every_sample(nvml: ScriptedNvml) -> None:
    for _ in range(10):
        nvml.poll()
        assert nvml.fact("gpu_power_limit_watts") == 700
    assert nvml.driver.calls("nvmlDeviceGetEnforcedPowerLimit") == 1
    nvml.poll("set 0 power_limit 500000")
    assert nvml.fact("gpu_power_limit_watts") == 500
    assert nvml.driver.calls("nvmlDeviceGetEnforcedPowerLimit") == 2
