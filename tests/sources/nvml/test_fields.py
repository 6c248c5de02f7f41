from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest

from agent.sources.nvml.fields import FIELDS
from tests.sources.nvml.watched import Watched

NOT_SUPPORTED, NO_PERMISSION, NO_DATA, GPU_IS_LOST, UNKNOWN = 3, 4, 21, 15, 999


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.nvml)
def test_the_binding_knows_every_field(field: Any) -> None:
    assert isinstance(getattr(pynvml, field.nvml), int)


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
def test_each_field_is_told_in_base_units(
    watched: Watched, number: int, raw: int, name: str, labels: tuple[str, ...], value: float
) -> None:
    watched.poll(f"field 0 {number} {raw}")
    assert watched.fact(name, *labels) == pytest.approx(value)


def test_a_field_of_32_bits_is_read_as_such(watched: Watched) -> None:
    watched.poll("narrow 0 94 4000000000")
    assert watched.fact("gpu_pcie_replays") == 4_000_000_000


@pytest.mark.parametrize("line", ["field 0 94 -1", "narrow 0 94 4294967295"])
def test_what_is_marked_as_not_available_is_unknown(watched: Watched, line: str) -> None:
    watched.poll(line)
    assert watched.fact("gpu_pcie_replays") is None
    watched.poll("field 0 94 3")
    assert watched.fact("gpu_pcie_replays") == 3


@pytest.mark.parametrize("code", [2, NOT_SUPPORTED, NO_PERMISSION])
def test_a_field_that_a_gpu_has_not_is_left_out_of_its_batch_alone(
    watched: Watched, code: int
) -> None:
    watched.driver.do("gpus 2", f"nofield 0 94 {code}")
    watched.poll()
    watched.poll("field -1 94 5")
    assert watched.fact("gpu_pcie_replays", index=0) is None
    assert watched.fact("gpu_pcie_replays", index=1) == 5
    assert watched.fact("gpu_energy_joules", index=0) is not None
    assert not watched.failures


def test_a_field_without_a_value_yet_is_asked_again(watched: Watched) -> None:
    watched.poll(f"nofield 0 94 {NO_DATA}")
    assert watched.fact("gpu_pcie_replays") is None
    watched.poll("field 0 94 1")
    assert watched.fact("gpu_pcie_replays") == 1


def test_a_field_that_fails_is_counted_and_asked_again(watched: Watched) -> None:
    watched.poll(f"nofield 0 94 {UNKNOWN}")
    assert watched.failures == ["call_failed"]
    assert watched.fact("gpu_energy_joules") is not None
    watched.poll("field 0 94 1")
    assert watched.fact("gpu_pcie_replays") == 1
    assert not watched.failures


def test_a_loss_that_only_a_field_tells_is_a_loss(watched: Watched) -> None:
    watched.poll()
    watched.poll(f"nofield 0 94 {GPU_IS_LOST}")
    assert watched.of(0).problem == "gpu_lost"


def test_nvlink_counters_in_bytes_go_before_those_in_kib_and_stay(watched: Watched) -> None:
    watched.driver.do("field 0 202 7", "field 0 204 8")
    for sent in (7, 9):
        watched.poll(f"field 0 202 {sent}")
        assert watched.fact("gpu_nvlink_transmitted_bytes") == sent
    # Another counter in its place would look like a leap.
    watched.poll(f"nofield 0 202 {NO_DATA}")
    assert watched.fact("gpu_nvlink_transmitted_bytes") is None


def test_an_old_gpu_tells_power_by_a_call_of_its_own(watched: Watched) -> None:
    watched.poll(f"nofield 0 185 {NOT_SUPPORTED}", "set 0 power 99000")
    assert watched.fact("gpu_power_watts") == 99
    assert watched.driver.calls("nvmlDeviceGetPowerUsage") == 1


def test_what_the_batch_told_needs_no_call_of_its_own(watched: Watched) -> None:
    watched.poll()
    assert watched.driver.calls("nvmlDeviceGetPowerUsage") == 0
    assert watched.driver.calls("nvmlDeviceGetTotalEnergyConsumption") == 0
