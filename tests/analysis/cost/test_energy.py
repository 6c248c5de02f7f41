"""Joules from energy counters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.cost.bill import energy_joules, spending
from agent.analysis.efficiency.time_range import TimeRange
from agent.catalog.gpu_facts import ENERGY
from agent.records.gpu import GpuSample
from tests.records.minutes import minute

MINUTE = TimeRange(0.0, 60.0)


def gpu_sample(gpu: str, at: float, joules: float | None) -> GpuSample:
    facts: dict[tuple[str, tuple[str, ...]], float] = {}
    if joules is not None:
        facts[ENERGY.name, ()] = joules
    return GpuSample(gpu=gpu, index=0, name="NVIDIA H100 80GB HBM3", at=at, facts=facts)


def test_several_gpus_add_up() -> None:
    samples = [
        gpu_sample("a", 0, 100),
        gpu_sample("b", 0, 0),
        gpu_sample("b", 60, 7000),
        gpu_sample("a", 60, 20_100),
    ]
    assert energy_joules(samples, ["a", "b"], MINUTE) == 27_000


def test_energy_is_interpolated_between_two_samples() -> None:
    samples = [gpu_sample("a", -30, 0), gpu_sample("a", 30, 600), gpu_sample("a", 90, 1800)]
    assert energy_joules(samples, ["a"], MINUTE) == pytest.approx(300 + 600)


def test_a_counter_reset_counts_from_zero() -> None:
    samples = [gpu_sample("a", 0, 5000), gpu_sample("a", 30, 6000), gpu_sample("a", 60, 400)]
    assert energy_joules(samples, ["a"], MINUTE) == 1400


def test_a_sample_without_energy_is_skipped() -> None:
    samples = [gpu_sample("a", 0, 0), gpu_sample("a", 30, None), gpu_sample("a", 60, 900)]
    assert energy_joules(samples, ["a"], MINUTE) == 900


@pytest.mark.parametrize(
    ("samples", "gpus"),
    [
        ([], ["a"]),
        ([("a", 0, 0), ("a", 59, 9)], ["a"]),
        ([("a", 1, 0), ("a", 60, 9)], ["a"]),
        ([("a", 0, None), ("a", 60, None)], ["a"]),
        ([("a", 0, 0), ("a", 60, 9)], ["a", "b"]),
        ([("a", 0, 0), ("a", 60, 9)], []),
    ],
)
def test_energy_is_unknown_unless_every_gpu_has_samples_for_the_whole_minute(
    samples: list[tuple[str, float, float | None]], gpus: list[str]
) -> None:
    assert energy_joules([gpu_sample(*values) for values in samples], gpus, MINUTE) is None


def test_other_engines_gpus_are_left_out() -> None:
    samples = [
        gpu_sample("a", 0, 0),
        gpu_sample("a", 60, 9),
        gpu_sample("b", 0, 0),
        gpu_sample("b", 60, 1000),
    ]
    assert energy_joules(samples, ["a"], MINUTE) == 9


@given(
    st.lists(st.floats(0, 1e9), min_size=2, max_size=8),
    st.floats(1, 59),
)
def test_the_energy_of_two_parts_is_the_energy_of_the_minute(
    counters: list[float], cut: float
) -> None:
    step = 60 / (len(counters) - 1)
    samples = [gpu_sample("a", place * step, joules) for place, joules in enumerate(counters[:-1])]
    samples.append(gpu_sample("a", 60.0, counters[-1]))
    parts = [
        energy_joules(samples, ["a"], window) for window in (TimeRange(0, cut), TimeRange(cut, 60))
    ]
    both = energy_joules(samples, ["a"], MINUTE)
    assert both is not None
    assert sum(part or 0.0 for part in parts) == pytest.approx(both, rel=1e-9, abs=1e-6)
    assert both >= 0


def test_joules_per_output_token() -> None:
    # 8 GPUs of 700 W for a minute, 1,000 tokens a second.
    booked = minute(joules=8 * 700 * 60, counted_output_tokens=60_000)
    assert spending([booked]).joules_per_output_token == pytest.approx(5.6)


@pytest.mark.parametrize(("joules", "tokens"), [(None, 5), (5, 0)])
def test_joules_per_output_token_are_unknown_without_joules_or_tokens(
    joules: float | None, tokens: float
) -> None:
    booked = minute(joules=joules, counted_output_tokens=tokens)
    assert spending([booked]).joules_per_output_token is None
