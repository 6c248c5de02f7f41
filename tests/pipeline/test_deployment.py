"""What is known of how an engine is deployed, and what is said where it does not fit together."""

from collections.abc import Sequence
from typing import Any

import pytest

from agent.catalog import engine_facts as fact
from agent.catalog import gpu_facts
from agent.catalog.precision import Precision
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
    """An engine, and why figures of it are missing."""

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
        """The short words."""
        return [reason for reason, _ in self.missing]


def gpus(count: int, name: str = H100, memory_gib: float | None = 79.6) -> list[GpuSample]:
    total: Facts = {(gpu_facts.MEMORY_TOTAL.name, ()): (memory_gib or 0.0) * GIB}
    facts = {} if memory_gib is None else total
    return [
        GpuSample(gpu=f"GPU-{index}", index=index, name=name, at=0.0, facts=facts)
        for index in range(count)
    ]


def page(*widths: float | None) -> list[EngineSample]:
    """Readings of a page that tells so many bytes of each value in the KV cache."""
    told: Sequence[dict[Any, float]] = [
        {} if each is None else {(fact.KV_VALUE_BYTES.name, ()): each} for each in widths
    ]
    return [
        EngineSample(engine="chat-0", at=float(at), dialect="vllm", model="llama", facts=facts)
        for at, facts in enumerate(told)
    ]


def cache_bits(deployed: Deployed, readings: Sequence[EngineSample]) -> float:
    model = deployed.engine.serving(gpus(1), 1, readings).model
    assert model is not None
    return model.cache_bits


def test_the_cache_is_as_wide_as_the_engines_page_says_last() -> None:
    deployed = Deployed(model=LLAMA)
    assert cache_bits(deployed, page(None)) == 16
    assert cache_bits(deployed, page(2.0, 1.0, None)) == 8


def test_what_the_settings_say_of_the_cache_wins_over_the_page() -> None:
    assert cache_bits(Deployed(model=LLAMA, cache_configured=True), page(1.0)) == 16


@pytest.mark.parametrize(
    ("given", "peak", "bandwidth"),
    [
        ({}, BF16, 3350e9),
        ({"peak_flops_per_s": 500e12}, 500e12, 3350e9),
        ({"bandwidth_bytes_per_s": 2000e9}, BF16, 2000e9),
    ],
)
def test_figures_of_the_settings_stand_in_for_the_tables(
    given: dict[str, float], peak: float, bandwidth: float
) -> None:
    serving = Deployed(model=LLAMA, configured_gpu=ConfiguredGpu(**given)).engine.serving(
        gpus(2), 1
    )
    assert serving.peak_flops_per_s == 2 * peak
    assert serving.bandwidth_bytes_per_s == 2 * bandwidth


@pytest.mark.parametrize("seen", [[], gpus(1, "A new GPU"), gpus(1, memory_gib=96.0)])
def test_with_both_figures_no_gpu_need_be_known(seen: list[GpuSample]) -> None:
    figures = ConfiguredGpu(peak_flops_per_s=1e12, bandwidth_bytes_per_s=1e9)
    deployed = Deployed(model=LLAMA, configured_gpu=figures)
    serving = deployed.engine.serving(seen, 1)
    assert (serving.peak_flops_per_s, serving.bandwidth_bytes_per_s) == (1e12, 1e9)
    assert deployed.missing == []


def test_one_figure_alone_makes_no_unknown_gpu_known() -> None:
    deployed = Deployed(model=LLAMA, configured_gpu=ConfiguredGpu(peak_flops_per_s=1e12))
    assert deployed.engine.serving(gpus(1, "A new GPU"), 1).gpu is None
    assert deployed.reasons == ["gpu_unknown"]


def test_the_peak_is_that_of_the_precision_in_which_the_model_multiplies() -> None:
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


def test_gpus_that_are_not_as_many_as_the_settings_say_are_told() -> None:
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
def test_ranks_that_are_not_as_many_as_the_settings_say_are_told(
    data: int, ranks: int, reasons: list[str]
) -> None:
    """One server of several tells its own rank alone, of which nothing follows."""
    deployed = Deployed(model=LLAMA, parallelism=Parallelism(tensor=2 // data, data=data))
    deployed.engine.serving(gpus(2), ranks)
    assert deployed.reasons == reasons


def test_gpus_of_several_kinds_and_parts_of_gpus_have_no_peak() -> None:
    mixed = Deployed(model=LLAMA)
    assert mixed.engine.serving([*gpus(1), *gpus(1, "NVIDIA H200")], 1).gpu is None
    part = MigInstance(
        uuid="MIG-1", name="1g", gpu_instance=1, compute_instance=0, gpu_slices=1, facts={}
    )
    sliced = Deployed(model=LLAMA)
    whole = GpuSample(gpu="a", index=0, name=H100, at=0.0, facts={}, mig_instances=(part,))
    assert sliced.engine.serving([whole], 1).gpu is None
    assert (mixed.reasons, sliced.reasons) == (["gpus_mixed"], ["gpu_sliced"])
