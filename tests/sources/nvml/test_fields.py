import pytest

from tests.sources.nvml.fake_driver import ScriptedNvml

NOT_SUPPORTED, NO_PERMISSION, NO_DATA, GPU_IS_LOST, UNKNOWN = 3, 4, 21, 15, 999
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
