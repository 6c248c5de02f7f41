"""MFU and MBU by three sources, also of a real GPU, and why they differ."""

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from agent.analysis.efficiency.disagreement import (
    Conditions,
    Source,
    SourceUtilisation,
    disagreements,
    hardware_utilisation,
)
from agent.catalog import gpu_facts as fact
from agent.catalog.hardware import Precision, recognise_gpu
from agent.records.gpu import Facts, GpuSample
from tests.analysis.cost.engine_days import (
    LLAMA_ON_H100,
    busy_samples,
    efficiency_in,
    engine_sample,
    observation,
)
from tests.analysis.efficiency.test_minute_efficiency import PROMPTS, gpu


def gpu_at(at: float, name: str = "GPU-1", /, **values: float) -> GpuSample:
    """A sample at the highest clock; `use` is whether kernels ran."""
    names = {"tensor": fact.TENSOR_ACTIVE, "memory": fact.DRAM_ACTIVE, "use": fact.UTILIZATION}
    facts: Facts = {(names[key].name, ()): value for key, value in values.items()}
    clocks: Facts = {(fact.CLOCK.name, ("sm",)): 1.9e9, (fact.CLOCK_MAX.name, ("sm",)): 1.9e9}
    return GpuSample(gpu=name, index=0, name="NVIDIA H200", at=at, facts={**facts, **clocks})


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        # Each GPU counts by the mean of its samples.
        (
            [
                *(gpu_at(at, tensor=0.2, memory=0.4) for at in (20.0, 40.0, 60.0)),
                gpu_at(30.0, "GPU-2", tensor=0.4, memory=0.8),
            ],
            (0.3, 0.6),
        ),
        # Counters at 0 while kernels run are unknown, unless the memory's are not.
        ([gpu_at(20.0, tensor=0.0, memory=0.0, use=0.9)], (None, None)),
        (
            [
                gpu_at(20.0, tensor=0.0, memory=0.0, use=0.9),
                gpu_at(30.0, "GPU-2", tensor=0.4, memory=0.8, use=1.0),
            ],
            (0.4, 0.8),
        ),
        (
            [
                gpu_at(20.0, tensor=0.0, memory=0.2, use=0.9),
                gpu_at(40.0, tensor=0.4, memory=0.4),
            ],
            (0.2, 0.3),
        ),
        # Unused.
        ([gpu_at(20.0, tensor=0.0, memory=0.0, use=0.0)], (0.0, 0.0)),
        ([gpu_at(20.0, tensor=0.0, memory=0.0)], (0.0, 0.0)),
    ],
)
def test_the_hardwares_figures_are_of_the_gpus_whose_counters_move(
    samples: list[GpuSample], expected: tuple[float | None, float | None]
) -> None:
    view = hardware_utilisation(samples)
    assert (view.mfu, view.mbu) == pytest.approx(expected)


PAIRS = list(permutations(Source, 2))


def views(figure: str, **values: float) -> list[SourceUtilisation]:
    return [
        SourceUtilisation(source=Source(name), **{figure: value}) for name, value in values.items()
    ]


@pytest.mark.parametrize("figure", ["mfu", "mbu"])
@pytest.mark.parametrize(("higher", "lower"), PAIRS)
def test_every_disagreement_has_a_cause(figure: str, higher: Source, lower: Source) -> None:
    (found,) = disagreements(views(figure, **{higher: 0.6, lower: 0.3}), Conditions())
    assert (found.figure, found.higher, found.lower, found.times) == (figure, higher, lower, 2)
    assert found.causes


@pytest.mark.parametrize(
    ("values", "differ"),
    [
        ({"requests": 0.40, "engine": 0.49}, False),
        ({"requests": 0.40, "engine": 0.51}, True),
        ({"engine": 0.40, "hardware": 0.49}, False),
        # The least work that requests need cannot exceed the work that was done.
        ({"requests": 0.42, "hardware": 0.40}, False),
        ({"requests": 0.43, "hardware": 0.40}, True),
        ({"requests": 0.004, "hardware": 0.001}, False),
        ({"requests": 0.4, "hardware": 0.0}, True),
    ],
)
def test_figures_may_differ_by_a_margin(values: dict[str, float], differ: bool) -> None:
    assert bool(disagreements(views("mfu", **values), Conditions())) is differ


@pytest.mark.parametrize(
    ("condition", "figure", "higher", "lower", "text"),
    [
        ("drafts", "mfu", "engine", "requests", "drafted"),
        ("preempted", "mfu", "hardware", "requests", "preempted"),
        ("unseen", "mbu", "engine", "requests", "without a row"),
        ("long_prompts", "mfu", "engine", "requests", "later tokens"),
        ("experts", "mbu", "engine", "requests", "experts"),
        ("replicas", "mfu", "requests", "engine", "data-parallel"),
        ("latents", "mfu", "requests", "engine", "latent attention"),
        ("quantised", "mbu", "requests", "engine", "quantised"),
        ("slow_clock", "mfu", "requests", "hardware", "clock"),
        ("still_counters", "mfu", "requests", "hardware", "stand still"),
    ],
)
def test_a_condition_of_the_minute_is_the_likely_cause(
    condition: str, figure: str, higher: str, lower: str, text: str
) -> None:
    utilisations = views(figure, **{higher: 0.6, lower: 0.3})
    (without,) = disagreements(utilisations, Conditions())
    (found,) = disagreements(utilisations, Conditions(**{condition: True}))
    assert text in found.causes[0]
    assert found.cause != without.cause
    assert not any(text in cause for cause in without.causes)


def test_an_engine_that_counts_all_pairs_of_long_prompts_disagrees() -> None:
    rows = [row._replace(input_tokens=32_000) for row in PROMPTS[:30]]
    # Per prompt: 13.96 GFLOP a token, and the scores of all pairs of tokens.
    square = 32_000 * 13.96e9 + 4 * 32 * 128 * 32 * 32_000.0**2
    samples = busy_samples(
        output=30, steps=30, input=960_000, cached=0, flops=30 * square, read=1.0, written=0
    )
    efficiency = efficiency_in(observation(samples), rows, LLAMA_ON_H100)
    causes = [found.causes[0] for found in efficiency.disagreements if found.figure == "mfu"]
    assert len(causes) == 1
    assert "later tokens" in causes[0]


def test_counted_preemptions_are_the_likely_cause() -> None:
    samples = busy_samples(output=120, input=480_000, cached=0, steps=120, preemptions=12)
    efficiency = efficiency_in(
        observation(samples), PROMPTS, LLAMA_ON_H100, [gpu(30.0, tensor=0.5)]
    )
    (found,) = efficiency.disagreements
    assert "preempted" in found.causes[0]


def test_requests_in_an_interval_without_samples_are_not_compared() -> None:
    """They are active for a third of the minute; the rest is unknown."""
    prompts = [row for row in PROMPTS if row.started_at < 20]
    gap = [
        engine_sample(at, running=1.0, output=at, steps=at, input=80_000 * at, flops=at * 40 * 1e12)
        for at in (-60.0, 120.0)
    ]
    efficiency = efficiency_in(observation(gap), prompts, LLAMA_ON_H100, [gpu(30.0, tensor=0.9)])
    assert (efficiency.requests.mfu or 0) > 2 * (efficiency.engine.mfu or 0) > 0
    (found,) = efficiency.disagreements
    assert (found.higher, found.lower) == (Source.HARDWARE, Source.ENGINE)


RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("h200.json").read_text())
PER_UNIT = 1e12
# The clock is one reading of a second in which it changes.
WITHIN = 0.05


def sample(row: dict[str, Any]) -> GpuSample:
    """The agent's sample after eight seconds of a load."""
    facts = {(name, tuple(labels)): float(value) for name, labels, value in keys(row)}
    return GpuSample(gpu="GPU-1", index=0, name=RECORDED["gpu"], at=0.0, facts=facts)


def keys(row: dict[str, Any]) -> list[tuple[str, list[str], float]]:
    """Names, labels and values of the facts in a row."""
    split = [(key.split("/"), value) for key, value in row["facts"].items()]
    return [(name, labels, value) for (name, *labels), value in split]


@pytest.mark.parametrize("row", RECORDED["rows"], ids=lambda row: row["load"])
def test_the_hardwares_figures_are_what_pytorch_did_by_the_clock(row: dict[str, Any]) -> None:
    gpu = sample(row)
    model = recognise_gpu(gpu.name, row["facts"]["gpu_memory_total_bytes"])
    assert model is not None
    seen = hardware_utilisation([gpu])
    if row["unit"] == "TFLOP/s":
        peak = model.peak_flops_per_s[Precision.BF16]
        assert seen.mfu == pytest.approx(PER_UNIT * row["achieved"] / peak, rel=WITHIN)
    else:
        share = PER_UNIT * row["achieved"] / model.bandwidth_bytes_per_s
        assert seen.mbu == pytest.approx(share, rel=WITHIN)
