"""The parts of a GPU's sample."""

import math
from collections.abc import Sequence

import pynvml  # type: ignore[import-untyped]
import pytest

from agent.catalog.gpu_facts import THROTTLE_REASONS
from agent.sources.nvml.sample_parts import ACTIVITIES
from tests.sources.nvml.fake_driver import MIB, ScriptedNvml

NOT_SUPPORTED, NO_PERMISSION, NO_DATA, GPU_IS_LOST, UNKNOWN = 3, 4, 21, 15, 999


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


HEAT_AND_BRAKE = ("sw_thermal", "hw_thermal", "hw_power_brake")


@pytest.mark.parametrize(
    ("number", "raw", "name", "labels", "value"),
    [
        (185, 423_000, "gpu_power_watts", (), 423),
        (186, 512_500, "gpu_power_instant_watts", (), 512.5),
        (83, 5_000_000, "gpu_energy_joules", (), 5000),
        (82, 61, "gpu_temperature_celsius", ("memory",), 61),
        (74, 2_500_000_000, "gpu_throttled_seconds", ("sw_power_cap",), 2.5),
        (76, 1_000_000_000, "gpu_throttled_seconds", ("sync_boost",), 1),
        (269, 1_000_000_000, "gpu_throttled_seconds", ("sw_thermal",), 1),
        (270, 1_000_000_000, "gpu_throttled_seconds", ("hw_thermal",), 1),
        (271, 1_000_000_000, "gpu_throttled_seconds", ("hw_power_brake",), 1),
        (1, 1, "gpu_ecc_enabled", (), 1),
        (3, 11, "gpu_ecc_errors", ("corrected", "driver_load"), 11),
        (4, 12, "gpu_ecc_errors", ("uncorrected", "driver_load"), 12),
        (5, 13, "gpu_ecc_errors", ("corrected", "lifetime"), 13),
        (6, 14, "gpu_ecc_errors", ("uncorrected", "lifetime"), 14),
        (142, 3, "gpu_remapped_rows", ("corrected",), 3),
        (143, 4, "gpu_remapped_rows", ("uncorrected",), 4),
        (144, 1, "gpu_row_remap_pending", (), 1),
        (145, 1, "gpu_row_remap_failed", (), 1),
        (29, 5, "gpu_retired_pages", ("corrected",), 5),
        (30, 6, "gpu_retired_pages", ("uncorrected",), 6),
        (31, 1, "gpu_page_retirement_pending", (), 1),
        (230, 4, "gpu_recovery_action", (), 4),
        (94, 7, "gpu_pcie_replays", (), 7),
        (197, 12345, "gpu_pcie_transmitted_bytes", (), 12345),
        (198, 54321, "gpu_pcie_received_bytes", (), 54321),
        (138, 10, "gpu_nvlink_transmitted_bytes", (), 10240),
        (139, 20, "gpu_nvlink_received_bytes", (), 20480),
        (202, 10, "gpu_nvlink_transmitted_bytes", (), 10),
        (204, 20, "gpu_nvlink_received_bytes", (), 20),
        (38, 1, "gpu_nvlink_errors", ("crc_flit",), 1),
        (45, 2, "gpu_nvlink_errors", ("crc_data",), 2),
        (52, 3, "gpu_nvlink_errors", ("replay",), 3),
        (59, 4, "gpu_nvlink_errors", ("recovery",), 4),
        (206, 5, "gpu_nvlink_errors", ("malformed_packet",), 5),
        (207, 6, "gpu_nvlink_errors", ("buffer_overrun",), 6),
        (211, 8, "gpu_nvlink_errors", ("link_integrity",), 8),
        (214, 9, "gpu_nvlink_errors", ("recovery_failed",), 9),
        (215, 10, "gpu_nvlink_errors", ("recovery",), 10),
    ],
)
def test_each_field_has_base_units(
    nvml: ScriptedNvml, number: int, raw: int, name: str, labels: tuple[str, ...], value: float
) -> None:
    nvml.poll(f"field 0 {number} {raw}")
    assert nvml.fact(name, *labels) == pytest.approx(value)


def _throttled(nvml: ScriptedNvml) -> list[float | None]:
    return [nvml.fact("gpu_throttled_seconds", reason) for reason in HEAT_AND_BRAKE]


@pytest.mark.parametrize(
    ("version", "first"),
    [
        ("575.57.08", 251),
        ("580.65.06", 251),
        ("580.82.07", 269),
        ("580.126.09", 269),
        ("615.71", 269),
    ],
)
def test_times_of_heat_and_power_brake_have_the_numbers_of_the_driver(
    nvml: ScriptedNvml, version: str, first: int
) -> None:
    # Under the other numbers stand settings of power smoothing.
    other = {251: 269, 269: 251}[first]
    numbers = [f"field 0 {other + place} 77" for place in range(3)]
    numbers += [f"field 0 {first + place} {place + 1}000000000" for place in range(3)]
    nvml.poll(f"version {version}", *numbers)
    assert _throttled(nvml) == [1, 2, 3]


@pytest.mark.parametrize("version", ["535.161.08", "570.172.08", "580.76.05", "a.b"])
def test_times_of_heat_and_power_brake_are_unknown_where_their_numbers_are_in_doubt(
    nvml: ScriptedNvml, version: str
) -> None:
    numbers = [f"field 0 {first + place} 77" for first in (251, 269) for place in range(3)]
    nvml.poll(f"version {version}", *numbers)
    assert _throttled(nvml) == [None] * 3
    assert nvml.fact("gpu_throttled_seconds", "sw_power_cap") == 0


def test_times_of_heat_are_read_once_the_drivers_version_is_known(nvml: ScriptedNvml) -> None:
    nvml.poll(f"answer -1 nvmlSystemGetDriverVersion {UNKNOWN}")
    nvml.poll("answer -1 nvmlSystemGetDriverVersion 0")
    assert _throttled(nvml) == [None] * 3
    assert nvml.fact("gpu_energy_joules") is not None
    nvml.poll(after_s=10)
    assert nvml.fact("gpu_throttled_seconds", "hw_thermal") is not None
    assert nvml.fact("gpu_throttled_seconds", "sw_power_cap") is not None


@pytest.mark.parametrize("kind", [7, 255])
def test_a_field_of_an_unknown_type_is_left_out_alone(nvml: ScriptedNvml, kind: int) -> None:
    for _ in range(2):
        nvml.poll(f"odd 0 94 {kind}")
        assert nvml.fact("gpu_pcie_replays") is None
        assert nvml.fact("gpu_energy_joules") is not None
        assert not nvml.failures


def test_a_field_of_32_bits_is_read_as_such(nvml: ScriptedNvml) -> None:
    nvml.poll("narrow 0 94 4000000000")
    assert nvml.fact("gpu_pcie_replays") == 4_000_000_000


@pytest.mark.parametrize("line", ["field 0 94 -1", "narrow 0 94 4294967295"])
def test_what_is_marked_as_not_available_is_unknown(nvml: ScriptedNvml, line: str) -> None:
    nvml.poll(line)
    assert nvml.fact("gpu_pcie_replays") is None
    nvml.poll("field 0 94 3")
    assert nvml.fact("gpu_pcie_replays") == 3


@pytest.mark.parametrize("code", [2, NOT_SUPPORTED, NO_PERMISSION])
def test_a_field_that_a_gpu_has_not_is_left_out_of_its_batch_alone(
    nvml: ScriptedNvml, code: int
) -> None:
    nvml.driver.do("gpus 2", f"nofield 0 94 {code}")
    nvml.poll()
    nvml.poll("field -1 94 5")
    assert nvml.fact("gpu_pcie_replays", index=0) is None
    assert nvml.fact("gpu_pcie_replays", index=1) == 5
    assert nvml.fact("gpu_energy_joules", index=0) is not None
    assert not nvml.failures


@pytest.mark.parametrize(("code", "failures"), [(NO_DATA, []), (UNKNOWN, ["call_failed"])])
def test_a_field_that_has_no_value_yet_or_fails_is_asked_again(
    nvml: ScriptedNvml, code: int, failures: list[str]
) -> None:
    nvml.poll(f"nofield 0 94 {code}")
    assert nvml.failures == failures
    assert nvml.fact("gpu_pcie_replays") is None
    assert nvml.fact("gpu_energy_joules") is not None
    nvml.poll("field 0 94 1")
    assert nvml.fact("gpu_pcie_replays") == 1
    assert not nvml.failures


def test_a_loss_that_only_a_field_reports_is_a_loss(nvml: ScriptedNvml) -> None:
    nvml.poll()
    nvml.poll(f"nofield 0 94 {GPU_IS_LOST}")
    assert nvml.of(0).problem == "gpu_lost"


def test_nvlink_counters_in_bytes_go_before_those_in_kib_and_stay(nvml: ScriptedNvml) -> None:
    nvml.driver.do("field 0 202 7", "field 0 204 8")
    for sent in (7, 9):
        nvml.poll(f"field 0 202 {sent}")
        assert nvml.fact("gpu_nvlink_transmitted_bytes") == sent
    # Another counter in its place would look like a leap.
    nvml.poll(f"nofield 0 202 {NO_DATA}")
    assert nvml.fact("gpu_nvlink_transmitted_bytes") is None


@pytest.mark.parametrize("code", [UNKNOWN, NO_DATA])
def test_a_counter_in_bytes_that_fails_at_first_is_waited_for(
    nvml: ScriptedNvml, code: int
) -> None:
    nvml.poll(f"nofield 0 202 {code}")
    assert nvml.fact("gpu_nvlink_transmitted_bytes") is None
    for sent in (7, 9):
        nvml.poll(f"field 0 202 {sent}")
        assert nvml.fact("gpu_nvlink_transmitted_bytes") == sent


def test_a_counter_that_always_fails_gives_way_to_the_other(nvml: ScriptedNvml) -> None:
    nvml.driver.do(f"nofield 0 202 {UNKNOWN}", f"nofield 0 138 {UNKNOWN}")
    for _ in range(10):
        nvml.poll()
    for sent in (7, 8):
        nvml.poll("field 0 202 1", f"field 0 138 {sent}")
        assert nvml.fact("gpu_nvlink_transmitted_bytes") == sent * 1024


def test_a_counter_that_has_a_value_is_not_replaced_by_a_later_one(nvml: ScriptedNvml) -> None:
    for line in ("field 0 202 -1", "field 0 202 7"):
        nvml.poll(line)
        assert nvml.fact("gpu_nvlink_transmitted_bytes") == 1000 * 1024


def test_the_power_of_an_old_gpu_has_a_call_of_its_own(nvml: ScriptedNvml) -> None:
    nvml.poll(f"nofield 0 185 {NOT_SUPPORTED}", "set 0 power 99000")
    assert nvml.fact("gpu_power_watts") == 99
    assert nvml.driver.calls("nvmlDeviceGetPowerUsage") == 1


def test_a_fact_of_the_batch_needs_no_call_of_its_own(nvml: ScriptedNvml) -> None:
    nvml.poll()
    assert nvml.driver.calls("nvmlDeviceGetPowerUsage") == 0
    assert nvml.driver.calls("nvmlDeviceGetTotalEnergyConsumption") == 0


RATIOS = [fact.name for _, fact in ACTIVITIES]


@pytest.mark.parametrize(("name", "fact"), ACTIVITIES, ids=RATIOS)
def test_each_activity_is_the_mean_since_the_last_poll_as_a_ratio(
    nvml: ScriptedNvml, name: str, fact: object
) -> None:
    number = getattr(pynvml, name)
    nvml.poll(f"activity 0 {number} 20")
    assert all(nvml.fact(name) is None for name in RATIOS)
    nvml.poll(f"activity 0 {number} 60")
    ratios = {name: nvml.fact(name) for name in RATIOS}
    assert ratios == {name: 0.4 if name == getattr(fact, "name", "") else 0 for name in RATIOS}
    nvml.poll()
    assert nvml.fact(getattr(fact, "name", "")) == 0.6


def test_polls_too_close_for_the_hardware_give_no_activity(nvml: ScriptedNvml) -> None:
    nvml.poll()
    nvml.poll("activity 0 2 50", after_s=0.05)
    assert nvml.fact("gpu_sm_active_ratio") is None
    nvml.poll()
    assert nvml.fact("gpu_sm_active_ratio") == 0.25


def test_a_mean_over_a_long_interval_is_left_out(nvml: ScriptedNvml) -> None:
    nvml.poll()
    nvml.poll(after_s=600)
    assert nvml.fact("gpu_sm_active_ratio") is None
    nvml.poll()
    assert nvml.fact("gpu_sm_active_ratio") == 0


def test_polls_rarer_than_every_minute_give_activity_too(nvml: ScriptedNvml) -> None:
    nvml.driver.do("activity 0 2 50")
    for _ in range(2):
        nvml.poll(after_s=120)
        assert nvml.fact("gpu_sm_active_ratio") is None
    for after_s in (120, 130, 200):
        nvml.poll(after_s=after_s)
        assert nvml.fact("gpu_sm_active_ratio") == 0.5
    nvml.poll(after_s=600)
    assert nvml.fact("gpu_sm_active_ratio") is None


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_no_number_is_unknown_and_costs_the_others_nothing(
    nvml: ScriptedNvml, number: float
) -> None:
    nvml.poll()
    nvml.poll(f"activity 0 10 {number}")
    assert nvml.fact("gpu_dram_active_ratio") is None
    assert nvml.fact("gpu_sm_active_ratio") == 0


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION])
def test_an_activity_that_a_gpu_has_not_is_left_out(nvml: ScriptedNvml, code: int) -> None:
    nvml.driver.do(f"noactivity 0 2 {code}", "activity 0 5 30", "activity 0 10 40")
    for _ in range(3):
        nvml.poll()
    assert nvml.fact("gpu_sm_active_ratio") is None
    assert nvml.fact("gpu_tensor_active_ratio") == 0.3
    assert nvml.fact("gpu_dram_active_ratio") == 0.4


def test_a_gpu_before_hopper_is_not_asked(nvml: ScriptedNvml) -> None:
    nvml.poll("set 0 gpm 0")
    nvml.poll()
    assert all(nvml.fact(name) is None for name in RATIOS)
    assert nvml.driver.calls("nvmlGpmSampleGet") == 0
    assert not nvml.failures


def test_samples_of_a_lost_gpu_are_given_back(nvml: ScriptedNvml) -> None:
    nvml.driver.do("gpus 2")
    nvml.poll()
    nvml.poll("lose 1 15")
    assert nvml.driver.calls("nvmlGpmSampleFree") == 2


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
