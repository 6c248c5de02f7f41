"""GPUs in the expositions of AMD's exporter, which the same source reads."""

import pytest

from agent.catalog.hardware import recognise_gpu
from agent.catalog.rocm_fields import ROCM_FIELDS
from agent.sources.dcgm.exporter_gpus import RowUnusable, entity_of
from tests.sources.dcgm.exporter_pages import (
    MIB,
    ScriptedExporter,
    body,
    gpu_of,
    gpus_of,
    page_of,
    row,
)

BUSY = "GPU-17ff74b5-0000-1000-805c-37b0fbe69430"


def test_a_page_has_the_facts_of_each_gpu_in_our_units() -> None:
    found = gpus_of(body("rocm-1.5"))
    busy, idle = found.gpus
    assert (busy.gpu, busy.index, idle.index) == (BUSY, 0, 1)
    assert busy.facts == {
        ("gpu_memory_total_bytes", ()): 196592 * MIB,
        ("gpu_memory_free_bytes", ()): 15592 * MIB,
        ("gpu_memory_used_bytes", ()): 181000 * MIB,
        ("gpu_utilization_ratio", ()): 0.97,
        ("gpu_memory_busy_ratio", ()): pytest.approx(0.41),
        ("gpu_power_watts", ()): 612,
        ("gpu_energy_joules", ()): pytest.approx(82147483),
        # The fastest of eight dies, though the rows name a pod.
        ("gpu_clock_hertz", ("sm",)): 2.1e9,
        ("gpu_clock_hertz", ("memory",)): 1.3e9,
        ("gpu_clock_max_hertz", ("sm",)): 2.1e9,
        ("gpu_clock_max_hertz", ("memory",)): 1.3e9,
        ("gpu_temperature_celsius", ("gpu",)): 71,
        ("gpu_temperature_celsius", ("memory",)): 55,
        ("gpu_ecc_errors", ("corrected", "driver_load")): 3,
        ("gpu_ecc_errors", ("uncorrected", "driver_load")): 0,
        ("gpu_pcie_replays", ()): 2,
    }
    assert idle.facts["gpu_utilization_ratio", ()] == 0
    assert found.dropped == {}


def test_the_model_is_known_by_its_name_and_memory() -> None:
    busy, _ = gpus_of(body("rocm-1.5")).gpus
    assert busy.name == "AMD Instinct MI300X"
    model = recognise_gpu(busy.name, busy.facts["gpu_memory_total_bytes", ()])
    assert model is not None
    assert model.name == "MI300X"


def test_without_uuids_a_serial_number_and_the_partition_name_a_gpu() -> None:
    first, second = gpus_of(body("rocm-1.3-partitions")).gpus
    assert (first.gpu, second.gpu) == ("692251000123", "692251000123/1")
    assert first.facts["gpu_power_watts", ()] == 310
    assert first.facts["gpu_clock_hertz", ("sm",)] == 1.7e9
    assert first.facts["gpu_temperature_celsius", ("gpu",)] == 44
    # A partition without sensors exports zeros.
    assert {name for name, _ in second.facts} == {
        f"gpu_memory_{part}_bytes" for part in ("total", "used", "free")
    }


def test_a_row_without_uuid_and_serial_number_is_of_no_gpu() -> None:
    with pytest.raises(RowUnusable, match="uuid_missing"):
        entity_of({"gpu_id": "0", "serial_number": "", "gpu_partition_id": "1"})


def test_every_spelling_gives_its_fact_alone() -> None:
    for field in ROCM_FIELDS:
        line = row(field.series, 1)
        if field.only is not None:
            line = row(field.series, 1, clock_type=field.only[1][0])
        assert gpu_of(page_of(line)).facts[field.key] == field.read(1), field.series


def test_two_containers_that_share_a_gpu_of_amd_may_disagree() -> None:
    shares = [
        row("gpu_used_vram", mib, pod="p", container=name) for name, mib in (("a", 1), ("b", 2))
    ]
    assert gpus_of(page_of(*shares)).dropped == {"pods_disagree": 1}


def test_clocks_of_a_shared_gpu_agree_by_their_type() -> None:
    clocks = {"system": 2100, "memory": 1300}
    shares = [
        row("gpu_clock", mhz, pod=pod, namespace="n", clock_type=kind)
        for pod in ("a", "b")
        for kind, mhz in clocks.items()
    ]
    found = gpus_of(page_of(*shares))
    assert found.dropped == {}
    assert found.gpus[0].facts == {
        ("gpu_clock_hertz", ("sm",)): 2.1e9,
        ("gpu_clock_hertz", ("memory",)): 1.3e9,
    }


def test_a_clock_that_the_driver_does_not_know_is_no_fact() -> None:
    unknown = row("gpu_clock", 2**64 - 1, clock_type="system")
    assert gpu_of(page_of(unknown, row("gpu_clock", 1300, clock_type="memory"))).facts == {
        ("gpu_clock_hertz", ("memory",)): 1.3e9
    }


def test_the_source_reads_amds_exporter_under_the_same_setting(
    dcgm: ScriptedExporter,
) -> None:
    dcgm.poll(page=body("rocm-1.5"))
    busy, _ = dcgm.samples
    assert (busy.gpu, busy.fact("gpu_up")) == (BUSY, 1)
    assert dcgm.failures == []
