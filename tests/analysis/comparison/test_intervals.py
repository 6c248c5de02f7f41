"""Intervals hold what they say, or say that the run is too short; a simulation knows the truth."""

from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from agent.analysis.comparison.cells import split_runs
from agent.analysis.comparison.comparing import Outcome, compare
from agent.analysis.comparison.days import evidence_of
from agent.analysis.comparison.dependence import block_length
from agent.analysis.comparison.measures import MEASURES
from tests.analysis.comparison.queue_runs import BurstyRun
from tests.analysis.comparison.test_comparing import autoregressive

OF_TPOT = [each for each in MEASURES if each.name.startswith("TPOT")]
RUNS = 30


@cache
def coverage(length_s: float, gap_s: float | None) -> dict[str, Counter[bool | None]]:
    """How often the interval of each percentile holds the truth; None counts those without one."""
    kind = partial(BurstyRun, gap_s=gap_s)
    long = kind(seed=0, length_s=200_000.0).run().tpot_s
    found: dict[str, Counter[bool | None]] = defaultdict(Counter)
    for seed in range(1, RUNS + 1):
        run = kind(seed=seed, length_s=length_s).run()
        split = split_runs(run, run)
        for measure in OF_TPOT:
            evidence = evidence_of(measure, split)
            assert evidence is not None
            _, low, high = evidence.before.interval
            truth = float(np.quantile(long, measure.quantile or 0.0))
            is_known = bool(np.isfinite([low, high]).all())
            found[measure.name][low <= truth <= high if is_known else None] += 1
    return found


# Of 30 intervals at 95 %, fewer than 25 are one in 300.
@pytest.mark.parametrize("gap_s", [None, 60.0])
@pytest.mark.parametrize("name", ["TPOT p50", "TPOT p95", "TPOT p99"])
def test_intervals_hold_the_truth_also_with_bursts(name: str, gap_s: float | None) -> None:
    found = coverage(1800.0, gap_s)[name]
    assert found[True] >= 0.83 * (RUNS - found[None]), found
    assert found[None] <= RUNS / 2, found


def test_a_run_with_few_bursts_is_too_short_for_its_tail() -> None:
    found = coverage(600.0, 60.0)["TPOT p99"]
    assert found[None] >= RUNS / 2, found
    assert found[False] <= RUNS / 8, found


def test_too_short_names_how_much_longer_and_leaves_the_other_percentiles() -> None:
    runs = [BurstyRun(seed=seed, length_s=600.0, gap_s=60.0).run() for seed in (1, 2)]
    lines = {line.measure.name: line for line in compare(*runs).lines}
    assert lines["TPOT p99"].outcome is Outcome.TOO_SHORT
    assert (lines["TPOT p99"].needed or 0) > 1.3
    assert lines["TPOT p50"].outcome is Outcome.NO_EVIDENCE


def test_if_nothing_is_known_of_a_median_the_whole_is_too_short() -> None:
    # A day-long wave of which each run has one.
    runs = []
    for seed in (1, 2):
        run = BurstyRun(seed=seed, length_s=600.0).run()
        wave = np.exp(np.sin(run.ended_s / 600.0 * 2 * np.pi + seed))
        runs.append(replace(run, tpot_s=run.tpot_s * wave, e2e_s=run.e2e_s * wave))
    found = compare(*runs)
    assert found.outcome is Outcome.TOO_SHORT
    # The same without a wave is not.
    flat = [BurstyRun(seed=seed, length_s=600.0).run() for seed in (1, 2)]
    assert compare(*flat).outcome is Outcome.NO_EVIDENCE


# By arch 8.0.0, `optimal_block_length(series)["circular"]`: seed, length, correlation, result.
OF_ARCH = [
    *((1, 480, 0.0, 3.9412), (2, 480, 0.3, 5.7279), (3, 480, 0.6, 14.8019)),
    *((4, 480, 0.9, 34.904), (5, 100, 0.5, 6.9773), (6, 1000, 0.8, 27.7509)),
]


@pytest.mark.parametrize(("seed", "number", "correlation", "expected"), OF_ARCH)
def test_the_block_length_is_that_of_politis_and_white(
    seed: int, number: int, correlation: float, expected: float
) -> None:
    series = autoregressive(np.random.default_rng(seed), number, correlation)
    assert block_length(series) == pytest.approx(expected, abs=1e-4)


def test_series_that_say_nothing_have_blocks_of_one_cell() -> None:
    assert block_length(np.zeros(480)) == 1.0
    assert block_length(np.arange(5.0)) == 1.0
