"""How an engine is deployed, and the reasons reported when its figures do not match."""

from collections.abc import Sequence
from typing import Any

import pytest

from agent.catalog import engine_facts as fact
from agent.catalog import gpu_facts
from agent.catalog.hardware import Precision
from agent.pipeline.deployment import ConfiguredGpu, EngineDeployment
from agent.records.engine import EngineSample
from agent.records.gpu import Facts, GpuSample, MigInstance
from agent.records.model import Parallelism
from agent.records.prices import PriceList
from tests.sources.model_config.published import published

GIB = 2**30
LLAMA = published("llama-3.1-8b")
H100 = "NVIDIA H100 80GB HBM3"
BF16, FP8 = 989.4e12, 1978.9e12


class Deployed:
    def __init__(self, **given: Any) -> None:
        self.missing: list[tuple[str, str]] = []
        self.engine = EngineDeployment(
            engine="chat-0",
            prices=PriceList(),
            gpus=list,
            missing=lambda *why: self.missing.append(why),
            **given,
        )

    @property
    def reasons(self) -> list[str]:
        return [reason for reason, _ in self.missing]


def gpus(count: int, name: str = H100, memory_gib: float | None = 79.6) -> list[GpuSample]:
    total: Facts = {(gpu_facts.MEMORY_TOTAL.name, ()): (memory_gib or 0.0) * GIB}
    facts = {} if memory_gib is None else total
    return [
        GpuSample(gpu=f"GPU-{index}", index=index, name=name, at=0.0, facts=facts)
        for index in range(count)
    ]


def engine_samples(*widths: float | None) -> list[EngineSample]:
    facts_by_sample: Sequence[dict[Any, float]] = [
        {} if each is None else {(fact.KV_VALUE_BYTES.name, ()): each} for each in widths
    ]
    return [
        EngineSample(engine="chat-0", at=float(at), dialect="vllm", model="llama", facts=facts)
        for at, facts in enumerate(facts_by_sample)
    ]


def cache_bits(deployed: Deployed, samples: Sequence[EngineSample]) -> float:
    model = deployed.engine.serving(gpus(1), 1, samples).model
    assert model is not None
    return model.cache_bits


def test_the_cache_has_the_width_of_the_last_sample_that_gives_it() -> None:
    deployed = Deployed(model=LLAMA)
    assert cache_bits(deployed, engine_samples(None)) == 16
    assert cache_bits(deployed, engine_samples(2.0, 1.0, None)) == 8


def test_the_configured_cache_width_overrides_the_engines() -> None:
    assert cache_bits(Deployed(model=LLAMA, cache_configured=True), engine_samples(1.0)) == 16


@pytest.mark.parametrize(
    ("given", "peak", "bandwidth"),
    [
        ({}, BF16, 3350e9),
        ({"peak_flops_per_s": 500e12}, 500e12, 3350e9),
        ({"bandwidth_bytes_per_s": 2000e9}, BF16, 2000e9),
    ],
)
def test_configured_figures_override_the_tables(
    given: dict[str, float], peak: float, bandwidth: float
) -> None:
    serving = Deployed(model=LLAMA, configured_gpu=ConfiguredGpu(**given)).engine.serving(
        gpus(2), 1
    )
    assert serving.peak_flops_per_s == 2 * peak
    assert serving.bandwidth_bytes_per_s == 2 * bandwidth


@pytest.mark.parametrize("samples", [[], gpus(1, "A new GPU"), gpus(1, memory_gib=96.0)])
def test_with_both_figures_configured_no_gpu_need_be_known(samples: list[GpuSample]) -> None:
    figures = ConfiguredGpu(peak_flops_per_s=1e12, bandwidth_bytes_per_s=1e9)
    deployed = Deployed(model=LLAMA, configured_gpu=figures)
    serving = deployed.engine.serving(samples, 1)
    assert (serving.peak_flops_per_s, serving.bandwidth_bytes_per_s) == (1e12, 1e9)
    assert deployed.missing == []


def test_one_configured_figure_alone_is_not_enough_for_an_unknown_gpu() -> None:
    deployed = Deployed(model=LLAMA, configured_gpu=ConfiguredGpu(peak_flops_per_s=1e12))
    assert deployed.engine.serving(gpus(1, "A new GPU"), 1).gpu is None
    assert deployed.reasons == ["gpu_unknown"]


def test_the_peak_is_that_of_the_models_compute_precision() -> None:
    fp8 = published("llama-3.1-8b-fp8")
    assert fp8.compute is Precision.FP8
    assert Deployed(model=fp8).engine.serving(gpus(1), 1).peak_flops_per_s == FP8


@pytest.mark.parametrize(("memory_gib", "known"), [(79.6, True), (None, True), (94.5, False)])
def test_another_product_under_the_same_name_is_unknown(
    memory_gib: float | None, known: bool
) -> None:
    deployed = Deployed(model=LLAMA)
    found = deployed.engine.serving(gpus(1, memory_gib=memory_gib), 1).gpu
    assert (found is not None) is known
    if not known:
        ((reason, why),) = deployed.missing
        assert reason == "gpu_unknown"
        assert "with 101 GB is known" in why


def test_a_number_of_gpus_that_differs_from_the_settings_is_reported() -> None:
    deployed = Deployed(model=LLAMA, parallelism=Parallelism(tensor=4))
    deployed.engine.serving(gpus(2), 1)
    ((reason, why),) = deployed.missing
    assert reason == "gpus_differ"
    assert "over 4 GPUs" in why
    assert "2 GPUs are seen" in why
    deployed.missing.clear()
    deployed.engine.serving(gpus(4), 1)
    deployed.engine.serving([], 1)
    assert deployed.missing == [], "where none can be read there is nothing to compare"


@pytest.mark.parametrize(
    ("data", "ranks", "reasons"), [(1, 2, ["ranks_differ"]), (2, 2, []), (2, 1, [])]
)
def test_a_number_of_ranks_that_differs_from_the_settings_is_reported(
    data: int, ranks: int, reasons: list[str]
) -> None:
    """One of several servers reports its own rank alone, which proves no difference."""
    deployed = Deployed(model=LLAMA, parallelism=Parallelism(tensor=2 // data, data=data))
    deployed.engine.serving(gpus(2), ranks)
    assert deployed.reasons == reasons


def test_mixed_gpus_and_mig_instances_have_no_peak() -> None:
    mixed = Deployed(model=LLAMA)
    assert mixed.engine.serving([*gpus(1), *gpus(1, "NVIDIA H200")], 1).gpu is None
    part = MigInstance(
        uuid="MIG-1", name="1g", gpu_instance=1, compute_instance=0, gpu_slices=1, facts={}
    )
    sliced = Deployed(model=LLAMA)
    whole = GpuSample(gpu="a", index=0, name=H100, at=0.0, facts={}, mig_instances=(part,))
    assert sliced.engine.serving([whole], 1).gpu is None
    assert (mixed.reasons, sliced.reasons) == (["gpus_mixed"], ["gpu_sliced"])
