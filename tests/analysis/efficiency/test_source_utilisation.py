"""Utilisation of a minute from the counters of GPUs."""

import pytest

from agent.analysis.efficiency.disagreement import hardware_utilisation
from agent.catalog import gpu_facts as fact
from agent.records.gpu import Facts, GpuSample


def gpu(at: float, name: str = "GPU-1", /, **values: float) -> GpuSample:
    """A sample at the highest clock; `use` is whether kernels ran."""
    names = {"tensor": fact.TENSOR_ACTIVE, "memory": fact.DRAM_ACTIVE, "use": fact.UTILIZATION}
    facts: Facts = {(names[key].name, ()): value for key, value in values.items()}
    clocks: Facts = {(fact.CLOCK.name, ("sm",)): 1.9e9, (fact.CLOCK_MAX.name, ("sm",)): 1.9e9}
    return GpuSample(gpu=name, index=0, name="NVIDIA H200", at=at, facts={**facts, **clocks})


def test_each_gpu_counts_by_the_mean_of_its_samples() -> None:
    samples = [
        *(gpu(at, tensor=0.2, memory=0.4) for at in (20.0, 40.0, 60.0)),
        gpu(30.0, "GPU-2", tensor=0.4, memory=0.8),
    ]
    view = hardware_utilisation(samples)
    assert [view.mfu, view.mbu] == pytest.approx([0.3, 0.6])


def test_counters_at_0_while_kernels_run_are_unknown() -> None:
    stuck = [gpu(at, tensor=0.0, memory=0.0, use=0.9) for at in (20.0, 40.0)]
    view = hardware_utilisation(stuck)
    assert (view.mfu, view.mbu) == (None, None)
    both = hardware_utilisation([*stuck, gpu(30.0, "GPU-2", tensor=0.4, memory=0.8, use=1.0)])
    assert (both.mfu, both.mbu) == (0.4, 0.8)


def test_a_sample_with_idle_tensor_cores_counts() -> None:
    samples = [gpu(20.0, tensor=0.0, memory=0.2, use=0.9), gpu(40.0, tensor=0.4, memory=0.4)]
    view = hardware_utilisation(samples)
    assert [view.mfu, view.mbu] == pytest.approx([0.2, 0.3])


@pytest.mark.parametrize("values", [{"use": 0.0}, {}])
def test_an_unused_gpu_has_a_utilisation_of_0(values: dict[str, float]) -> None:
    view = hardware_utilisation([gpu(20.0, tensor=0.0, memory=0.0, **values)])
    assert (view.mfu, view.mbu) == (0.0, 0.0)
