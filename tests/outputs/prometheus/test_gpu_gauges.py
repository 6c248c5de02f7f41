"""GPUs on the exposition."""

from agent.catalog import gpu_facts as facts
from agent.outputs.prometheus.gpu_gauges import gpu_families
from agent.records.gpu import GpuSample, MigInstance
from tests.records.making import NOON

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def sample(gpu: str, used_bytes: float, *instances: MigInstance) -> GpuSample:
    values = {(facts.MEMORY_USED.name, ()): used_bytes, (facts.CLOCK.name, ("sm",)): 1.98e9}
    return GpuSample(
        gpu=gpu, index=0, name="NVIDIA H200", at=NOON, facts=values, mig_instances=instances
    )


def series(*samples: GpuSample) -> Series:
    return {
        (shown.name, tuple(shown.labels.items())): shown.value
        for family in gpu_families(samples)
        for shown in family.samples
    }


def test_every_fact_has_the_gpu_as_a_label() -> None:
    shown = series(sample("GPU-a", 3.0), sample("GPU-b", 2.0))
    assert shown["gpu_memory_used_bytes", (("gpu", "GPU-a"),)] == 3.0
    assert shown["gpu_memory_used_bytes", (("gpu", "GPU-b"),)] == 2.0
    assert shown["gpu_clock_hertz", (("gpu", "GPU-a"), ("clock", "sm"))] == 1.98e9


def test_a_mig_instance_has_its_own_uuid() -> None:
    instance = MigInstance(
        uuid="MIG-1",
        name="1g.18gb",
        gpu_instance=1,
        compute_instance=0,
        gpu_slices=1,
        facts={(facts.MEMORY_USED.name, ()): 5.0},
    )
    shown = series(sample("GPU-a", 1.0, instance))
    assert shown["gpu_memory_used_bytes", (("gpu", "MIG-1"),)] == 5.0


def test_a_fact_that_no_gpu_reports_is_not_on_the_exposition() -> None:
    assert series() == {}
    shown = series(sample("GPU-a", 1.0))
    assert {name for name, _ in shown} == {"gpu_memory_used_bytes", "gpu_clock_hertz"}
