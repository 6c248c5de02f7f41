"""Intervals and chances, against simulations of which the truth is known."""

import numpy as np
import pytest

from agent.analysis.comparison.resampling import (
    Ratio,
    Shuffles,
    absolute,
    chance,
    chance_of_correlated,
    interval,
    percentiles,
    rejected,
    together,
    variation,
)
from agent.analysis.comparison.run_columns import Blocks
from agent.records.columns import Array

REPETITIONS = 200


def autoregressive(random: np.random.Generator, number: int, correlation: float) -> Array:
    """A series of mean 0 and variance 1, each value like the one before."""
    values = random.normal(size=number)
    for place in range(1, number):
        values[place] *= np.sqrt(1 - correlation**2)
        values[place] += correlation * values[place - 1]
    return values


def mean_of(values: Array) -> Ratio:
    return Ratio(values + 10.0, np.ones(len(values)))


@pytest.mark.parametrize(("blocks", "correlation"), [(8, 0.0), (40, 0.0), (40, 0.4)])
def test_an_interval_holds_the_truth_as_often_as_it_says(blocks: int, correlation: float) -> None:
    random = np.random.default_rng(3)
    held = 0
    for _ in range(REPETITIONS):
        figure = mean_of(autoregressive(random, blocks, correlation))
        spread = variation(figure, blocks, 0.0).spread
        found = interval(figure, blocks, spread, absolute)
        held += found.low <= 10.0 <= found.high
    # Of 200 at 95 %, fewer than 180 are one in a thousand.
    assert held >= 180


@pytest.mark.parametrize(("blocks", "correlation"), [(8, 0.0), (24, 0.0), (24, 0.4)])
def test_equal_runs_are_rarely_apart(blocks: int, correlation: float) -> None:
    random = np.random.default_rng(4)
    shuffles = Shuffles.of(blocks, blocks)
    chances = []
    for _ in range(REPETITIONS):
        pair = [mean_of(autoregressive(random, blocks, correlation)) for _ in range(2)]
        first, second = (variation(each, blocks, 0.0) for each in pair)
        values = (pair[0].value, pair[1].value)
        chances.append(
            max(
                chance(together(*pair), shuffles, absolute),
                chance_of_correlated(values, (first, second), absolute),
            )
        )
    # Of 200 at 5 %, more than 20 are one in a thousand.
    assert sum(each <= 0.05 for each in chances) <= 20


def test_runs_that_are_far_apart_are_never_so_by_chance() -> None:
    random = np.random.default_rng(5)
    pair = [mean_of(random.normal(size=20)), mean_of(random.normal(size=20) + 3)]
    assert chance(together(*pair), Shuffles.of(20, 20), absolute) < 0.001


def test_correlated_blocks_vary_as_the_theory_says() -> None:
    series = autoregressive(np.random.default_rng(6), 4000, 0.6)
    # The variance of the mean of an AR(1) process is (1 + r) / (1 - r) times as large.
    assert variation(mean_of(series), 4000, 0.0).spread == pytest.approx(
        np.sqrt(1.6 / 0.4), rel=0.05
    )


@pytest.mark.parametrize("quantile", [0.5, 0.95, 0.99])
def test_a_percentile_is_that_of_numpy_in_any_mix_of_blocks(quantile: float) -> None:
    random = np.random.default_rng(7)
    places = np.sort(random.integers(0, 10, 3000))
    values = np.exp(random.normal(size=3000) + places / 5)
    values[::50] = np.nan
    (found,) = percentiles(quantile, [values], [Blocks(10, places)]) or ()
    known = values[np.isfinite(values)]
    assert found.value == np.quantile(known, quantile, method="inverted_cdf")
    weights = np.eye(10)
    of_blocks = [
        np.quantile(known[places[np.isfinite(values)] == block], quantile, method="inverted_cdf")
        for block in range(10)
    ]
    assert found.of(weights) == pytest.approx(np.array(of_blocks), rel=0.05)
    assert found.of(np.ones((1, 10)))[0] == pytest.approx(found.value, rel=0.03)


def test_without_a_value_there_is_no_percentile() -> None:
    nothing = np.full(5, np.nan)
    blocks = Blocks(5, np.arange(5))
    assert percentiles(0.5, [nothing, np.ones(5)], [blocks, blocks]) is None


def test_several_chances_are_judged_together_as_holm_does() -> None:
    # The example of Wikipedia's "Holm-Bonferroni method" (2026): only the first two are rejected.
    assert rejected([0.01, 0.04, 0.03, 0.005], 0.05) == [True, False, False, True]
