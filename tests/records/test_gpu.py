"""Facts of a GPU sample."""

import pytest

from agent.records.gpu import GpuSample


@pytest.fixture
def sample() -> GpuSample:
    facts = {("gpu_up", ()): 1.0, ("gpu_clock_hertz", ("sm",)): 1.98e9}
    return GpuSample(gpu="GPU-0", index=0, name="NVIDIA H200", at=1.0, facts=facts)


def test_a_fact_is_found_by_its_name_and_labels(sample: GpuSample) -> None:
    assert sample.fact("gpu_up") == 1
    assert sample.fact("gpu_clock_hertz", "sm") == 1.98e9


def test_an_unknown_fact_is_none_and_not_zero(sample: GpuSample) -> None:
    assert sample.fact("gpu_clock_hertz", "memory") is None
    assert sample.fact("gpu_clock_hertz") is None
    assert sample.fact("gpu_power_watts") is None
