"""The parts of a GPU's sample."""

from collections.abc import Sequence

import pynvml  # type: ignore[import-untyped]
import pytest

from agent.catalog.gpu_facts import THROTTLE_REASONS
from agent.sources.nvml.sample_parts import ACTIVITIES
from tests.sources.nvml.fake_driver import (
    KNOWN,
    MIB,
    Poll,
    Scenarios,
    ScriptedNvml,
    Seen,
    check,
    poll,
)

INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION = 2, 3, 4
NO_DATA, GPU_IS_LOST, UNKNOWN = 21, 15, 999
HEAT_AND_BRAKE = ("sw_thermal", "hw_thermal", "hw_power_brake")

MPS_LIST = "nvmlDeviceGetMPSComputeRunningProcesses_v3"
COMPUTE_LIST = "nvmlDeviceGetComputeRunningProcesses_v3"
REASONS_CALL = "nvmlDeviceGetCurrentClocksEventReasons"
SENT, REPLAYS, ACTIVE = "gpu_nvlink_transmitted_bytes", "gpu_pcie_replays", "gpu_sm_active_ratio"

PARTS: Scenarios = {
    "memory that the driver reserves is not used memory": [
        poll(f"set 0 memory_used {1000 * MIB}"),
        {"gpu_memory_total_bytes": 143771 * MIB, "gpu_memory_reserved_bytes": 614 * MIB,
         "gpu_memory_used_bytes": 1000 * MIB, "gpu_memory_free_bytes": (143771 - 614 - 1000) * MIB},
    ],
    "the first version of the memory call gives only facts that mean the same": [
        poll(f"answer 0 nvmlDeviceGetMemoryInfo_v2 {NOT_SUPPORTED}"),
        {"gpu_memory_total_bytes": 143771 * MIB, "gpu_memory_free_bytes": (143771 - 614) * MIB,
         "gpu_memory_used_bytes": None},
    ],
    "ratios and clocks are in base units": [
        poll("set 0 utilization 87", "set 0 memory_busy 12", "set 0 sm_clock 1755"),
        {"gpu_utilization_ratio": 0.87, "gpu_memory_busy_ratio": 0.12,
         "gpu_clock_hertz/sm": 1.755e9, "gpu_clock_hertz/memory": 3.201e9,
         "gpu_clock_max_hertz/sm": 1.98e9, "gpu_clock_max_hertz/memory": 3.201e9},
        poll("set 0 persistence 0", after_s=10), {"gpu_persistence_mode": 0},
        poll("set 0 persistence 1", after_s=10), {"gpu_persistence_mode": 1},
    ],
    "memory that is forbidden is unknown and not zero": [
        poll(f"answer 0 nvmlDeviceGetMemoryInfo_v2 {NO_PERMISSION}",
             f"answer 0 nvmlDeviceGetMemoryInfo {NO_PERMISSION}"),
        {"gpu_memory_used_bytes": None, "gpu_memory_total_bytes": None, "gpu_up": 1},
    ],
    "the new temperature call is enough where there is one": [
        poll("set 0 temperature 71"),
        {"gpu_temperature_celsius/gpu": 71, "calls nvmlDeviceGetTemperature": 0},
    ],
    "the old temperature call replaces the new": [
        poll(f"answer 0 nvmlDeviceGetTemperatureV {NOT_SUPPORTED}", "set 0 temperature 40"),
        {"gpu_temperature_celsius/gpu": 40},
        poll("set 0 temperature 41"),
        {"gpu_temperature_celsius/gpu": 41, "calls nvmlDeviceGetTemperatureV": 1},
    ],
    "the old name of the reasons replaces the new": [
        poll(f"answer 0 {REASONS_CALL} {NOT_SUPPORTED}", f"set 0 throttle {0x4}"),
        {"gpu_throttle_active/sw_power_cap": 1},
        poll(f"set 0 throttle {0x40}"),
        {"gpu_throttle_active/hw_thermal": 1, f"calls {REASONS_CALL}": 1},
    ],
    "limits and maxima are read rarely and are in every sample": [
        poll(times=10),
        {"gpu_power_limit_watts": 700, "calls nvmlDeviceGetEnforcedPowerLimit": 1},
        poll("set 0 power_limit 500000"),
        {"gpu_power_limit_watts": 500, "calls nvmlDeviceGetEnforcedPowerLimit": 2},
    ],
    "times of heat are read once the driver's version is known": [
        poll(f"answer -1 nvmlSystemGetDriverVersion {UNKNOWN}"),
        poll("answer -1 nvmlSystemGetDriverVersion 0"),
        {f"gpu_throttled_seconds/{reason}": None for reason in HEAT_AND_BRAKE},
        {"gpu_energy_joules": KNOWN},
        poll(after_s=10),
        {"gpu_throttled_seconds/hw_thermal": KNOWN, "gpu_throttled_seconds/sw_power_cap": KNOWN},
    ],
    "reasons that a GPU does not support are unknown": [
        poll(f"set 0 throttle_known {0x4 | 0x40}"),
        {"gpu_throttle_active/sw_power_cap": 0, "gpu_throttle_active/hw_thermal": 0,
         "gpu_throttle_active/idle": None, "gpu_throttle_active/sw_thermal": None},
    ],
    **{
        f"a field that a GPU has not is left out of its batch alone, by code {code}": [
            poll("gpus 2", f"nofield 0 94 {code}"), poll("field -1 94 5"),
            {f"{REPLAYS}@0": None, f"{REPLAYS}@1": 5, "gpu_energy_joules": KNOWN, "failures": []},
        ]
        for code in (INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION)
    },
    "a field of an unknown type is left out alone": [
        poll("odd 0 94 7", times=2),
        {REPLAYS: None, "gpu_energy_joules": KNOWN, "failures": []},
        poll("odd 0 94 255", times=2),
        {REPLAYS: None, "gpu_energy_joules": KNOWN, "failures": []},
    ],
    "a field of 32 bits is read as such": [
        poll("narrow 0 94 4000000000"), {REPLAYS: 4_000_000_000},
    ],
    "what is marked as not available is unknown": [
        poll("field 0 94 -1"), {REPLAYS: None}, poll("field 0 94 3"), {REPLAYS: 3},
        poll("narrow 0 94 4294967295"), {REPLAYS: None},
    ],
    "a field that has no value yet is asked again": [
        poll(f"nofield 0 94 {NO_DATA}"),
        {"failures": [], REPLAYS: None, "gpu_energy_joules": KNOWN},
        poll("field 0 94 1"), {REPLAYS: 1, "failures": []},
    ],
    "a field that fails is asked again": [
        poll(f"nofield 0 94 {UNKNOWN}"),
        {"failures": ["call_failed"], REPLAYS: None, "gpu_energy_joules": KNOWN},
        poll("field 0 94 1"), {REPLAYS: 1, "failures": []},
    ],
    "a loss that only a field reports is a loss": [
        poll(), poll(f"nofield 0 94 {GPU_IS_LOST}"), {"problem": "gpu_lost"},
    ],
    "NVLink counters in bytes go before those in KiB, and stay": [
        poll("field 0 202 7", "field 0 204 8"), {SENT: 7},
        poll("field 0 202 9"), {SENT: 9},
        # Another counter in its place would look like a leap.
        poll(f"nofield 0 202 {NO_DATA}"), {SENT: None},
    ],
    "a counter in bytes that fails at first is waited for": [
        poll(f"nofield 0 202 {UNKNOWN}"), {SENT: None},
        poll("field 0 202 7"), {SENT: 7},
        poll("field 0 202 9"), {SENT: 9},
    ],
    "a counter in bytes that has no value at first is waited for": [
        poll(f"nofield 0 202 {NO_DATA}"), {SENT: None},
        poll("field 0 202 7"), {SENT: 7},
    ],
    "a counter that always fails gives way to the other": [
        poll(f"nofield 0 202 {UNKNOWN}", f"nofield 0 138 {UNKNOWN}", times=10),
        poll("field 0 202 1", "field 0 138 7"), {SENT: 7 * 1024},
        poll("field 0 138 8"), {SENT: 8 * 1024},
    ],
    "a counter that has a value is not replaced by a later one": [
        poll("field 0 202 -1"), {SENT: 1000 * 1024},
        poll("field 0 202 7"), {SENT: 1000 * 1024},
    ],
    "the power of an old GPU has a call of its own": [
        poll(f"nofield 0 185 {NOT_SUPPORTED}", "set 0 power 99000"),
        {"gpu_power_watts": 99, "calls nvmlDeviceGetPowerUsage": 1},
    ],
    "a fact of the batch needs no call of its own": [
        poll(),
        {"calls nvmlDeviceGetPowerUsage": 0, "calls nvmlDeviceGetTotalEnergyConsumption": 0},
    ],
    "polls too close for the hardware give no activity": [
        poll(), poll("activity 0 2 50", after_s=0.05), {ACTIVE: None}, poll(), {ACTIVE: 0.25},
    ],
    "a mean over a long interval is left out": [
        poll(), poll(after_s=600), {ACTIVE: None}, poll(), {ACTIVE: 0},
    ],
    "polls rarer than every minute give activity too": [
        poll("activity 0 2 50", after_s=120, times=2), {ACTIVE: None},
        poll(after_s=120), {ACTIVE: 0.5}, poll(after_s=200), {ACTIVE: 0.5},
        poll(after_s=600), {ACTIVE: None},
    ],
    **{
        f"an activity that a GPU has not is left out, by code {code}": [
            poll(f"noactivity 0 2 {code}", "activity 0 5 30", "activity 0 10 40", times=3),
            {ACTIVE: None, "gpu_tensor_active_ratio": 0.3, "gpu_dram_active_ratio": 0.4},
        ]
        for code in (NOT_SUPPORTED, NO_PERMISSION)
    },
    "a GPU before Hopper is not asked for activity": [
        poll("set 0 gpm 0", times=2),
        {ACTIVE: None, "gpu_dram_active_ratio": None, "calls nvmlGpmSampleGet": 0, "failures": []},
    ],
    "what is no number is unknown and costs the others nothing": [
        poll(), poll("activity 0 10 nan"), {"gpu_dram_active_ratio": None, ACTIVE: 0},
        poll("activity 0 10 inf"), {"gpu_dram_active_ratio": None, ACTIVE: 0},
    ],
    "samples of a lost GPU are given back": [
        poll("gpus 2"), poll("lose 1 15"), {"calls nvmlGpmSampleFree": 2},
    ],
    "no process has memory": [poll(), {"processes": {}}],
    "each process has its memory, if that is known": [
        poll("process 0 compute 7 -1", "process 0 compute 8 5"), {"processes": {7: None, 8: 5}},
    ],
    "a process in several slices has the memory of all": [
        poll("process 0 compute 7 10", "process 0 compute 7 20"), {"processes": {7: 30}},
    ],
    "processes of MPS are listed with the others": [
        poll("process 0 compute 7 10", "process 0 mps 8 20", "process 0 mps 7 10"),
        {"processes": {7: 10, 8: 20}},
    ],
    "a driver without MPS has one list": [
        poll("process 0 compute 7 10", f"answer 0 {MPS_LIST} {NOT_SUPPORTED}"),
        {"processes": {7: 10}},
    ],
    "a long list is read to its end": [
        poll(*(f"process 0 compute {pid} {pid}" for pid in range(100, 120))),
        {"processes": {pid: pid for pid in range(100, 120)}},
    ],
    **{
        f"processes are unknown if a list may hold more: {', '.join(script)}": [
            poll(*script), {"processes": None},
        ]
        for script in (
            (f"answer 0 {COMPUTE_LIST} {NO_PERMISSION}",),
            (f"answer 0 {COMPUTE_LIST} {NO_PERMISSION}", f"answer 0 {MPS_LIST} {NOT_SUPPORTED}"),
            (f"answer 0 {COMPUTE_LIST} {UNKNOWN}",),
            (f"answer 0 {MPS_LIST} {UNKNOWN}",),
        )
    },
    "a list that always fails does not hide the other": [
        poll("process 0 compute 7 10", f"answer 0 {MPS_LIST} {UNKNOWN}"), {"processes": {7: 10}},
        poll(times=29), {"processes": {7: 10}},
    ],
    "processes are unknown while a list that was read before fails": [
        poll("process 0 compute 7 10", "process 0 mps 8 20"),
        poll(f"answer 0 {MPS_LIST} {UNKNOWN}", after_s=10), {"processes": None},
    ],
    "the slow lists are read every ten seconds and repeated in between": [
        poll("process 0 compute 7 10"), poll("process 0 compute 8 10"), {"processes": {7: 10}},
        poll(times=8), {"processes": {7: 10}}, poll(), {"processes": {7: 10, 8: 10}},
    ],
    "a GPU that cannot be read has unknown processes": [
        poll("process 0 compute 7 10"), poll("lose 0 15"), {"processes": None},
    ],
}  # fmt: skip


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_the_parts_of_a_sample(nvml: ScriptedNvml, parts: Sequence[Poll | Seen]) -> None:
    check(nvml, parts)


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
