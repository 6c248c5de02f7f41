"""Joules from energy counters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.cost.energy import energy_joules
from agent.analysis.cost.window_cost import spending
from agent.analysis.efficiency.time_range import TimeRange
from agent.catalog.gpu_facts import ENERGY
from agent.records.gpu import GpuSample
from tests.records.minutes import minute

MINUTE = TimeRange(0.0, 60.0)


def told(gpu: str, at: float, joules: float | None) -> GpuSample:
    facts: dict[tuple[str, tuple[str, ...]], float] = {}
    if joules is not None:
        facts[ENERGY.name, ()] = joules
    return GpuSample(gpu=gpu, index=0, name="NVIDIA H100 80GB HBM3", at=at, facts=facts)


def test_several_gpus_add_up() -> None:
    samples = [told("a", 0, 100), told("b", 0, 0), told("b", 60, 7000), told("a", 60, 20_100)]
    assert energy_joules(samples, ["a", "b"], MINUTE) == 27_000


def test_energy_flows_evenly_between_two_samples() -> None:
    samples = [told("a", -30, 0), told("a", 30, 600), told("a", 90, 1800)]
    assert energy_joules(samples, ["a"], MINUTE) == pytest.approx(300 + 600)


def test_a_counter_that_began_anew_counts_from_zero() -> None:
    samples = [told("a", 0, 5000), told("a", 30, 6000), told("a", 60, 400)]
    assert energy_joules(samples, ["a"], MINUTE) == 1400


def test_a_sample_that_failed_leaves_the_counter_to_the_next() -> None:
    samples = [told("a", 0, 0), told("a", 30, None), told("a", 60, 900)]
    assert energy_joules(samples, ["a"], MINUTE) == 900


@pytest.mark.parametrize(
    ("readings", "gpus"),
    [
        ([], ["a"]),
        ([("a", 0, 0), ("a", 59, 9)], ["a"]),
        ([("a", 1, 0), ("a", 60, 9)], ["a"]),
        ([("a", 0, None), ("a", 60, None)], ["a"]),
        ([("a", 0, 0), ("a", 60, 9)], ["a", "b"]),
        ([("a", 0, 0), ("a", 60, 9)], []),
    ],
)
def test_energy_is_unknown_unless_every_gpu_was_read_from_end_to_end(
    readings: list[tuple[str, float, float | None]], gpus: list[str]
) -> None:
    assert energy_joules([told(*reading) for reading in readings], gpus, MINUTE) is None


def test_other_engines_gpus_are_left_out() -> None:
    samples = [told("a", 0, 0), told("a", 60, 9), told("b", 0, 0), told("b", 60, 1000)]
    assert energy_joules(samples, ["a"], MINUTE) == 9


@given(
    st.lists(st.floats(0, 1e9), min_size=2, max_size=8),
    st.floats(1, 59),
)
def test_a_minute_cut_in_two_draws_the_same(counters: list[float], cut: float) -> None:
    step = 60 / (len(counters) - 1)
    samples = [told("a", place * step, joules) for place, joules in enumerate(counters[:-1])]
    samples.append(told("a", 60.0, counters[-1]))
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
def test_joules_per_output_token_are_unknown_without_either(
    joules: float | None, tokens: float
) -> None:
    booked = minute(joules=joules, counted_output_tokens=tokens)
    assert spending([booked]).joules_per_output_token is None
