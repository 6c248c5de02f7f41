"""Verdicts on two runs, of made-up and of recorded requests."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.analysis.comparison.cells import SortedColumn
from agent.analysis.comparison.comparing import Comparison, Outcome, compare, compare_figures
from agent.analysis.comparison.percentiles import percentiles
from agent.analysis.comparison.resampling import (
    Ratio,
    Shuffles,
    absolute,
    chance,
    chance_of_correlated,
    interval,
    rejected,
    together,
    variation,
)
from agent.analysis.comparison.run_columns import (
    MinuteColumns,
    RunColumns,
    RunFigures,
    run_of,
)
from agent.records.columns import Array
from agent.sources.result_files import BenchedRun, read_result_file
from tests.analysis.comparison.queue_runs import QueuedRun
from tests.records.making import objective

BEFORE = QueuedRun(seed=1).run()


def outcomes(found: Comparison) -> Mapping[str, Outcome]:
    return {line.measure.name: line.outcome for line in (*found.load, *found.lines)}


def test_a_run_is_no_different_from_itself_or_from_one_with_the_same_settings() -> None:
    quiet = [replace(run, events={}) for run in (BEFORE, QueuedRun(seed=2).run())]
    found = compare(*quiet)
    assert found.outcome is Outcome.NO_EVIDENCE
    known = {Outcome.NO_EVIDENCE, Outcome.UNKNOWN, Outcome.TOO_SHORT}
    assert set(outcomes(found).values()) <= known
    # Of 450 requests, 4 are beyond the 99th percentile.
    short = {name for name, each in outcomes(found).items() if each is Outcome.TOO_SHORT}
    assert {"TTFT p99", "TPOT p99", "end to end p99"} <= short
    assert not any(name.endswith("p50") for name in short)
    assert outcomes(found)["OOMs"] is Outcome.NO_EVIDENCE
    itself = compare(BEFORE, BEFORE)
    assert itself.outcome is Outcome.NO_EVIDENCE
    assert {line.change for line in itself.lines if line.before is not None} == {0.0}
    assert all(str(line.before) == str(line.after) for line in itself.lines)


def test_half_as_many_servers_are_worse_and_twice_as_many_better() -> None:
    half = QueuedRun(seed=2, servers=4).run()
    found = compare(BEFORE, half)
    assert found.outcome is Outcome.WORSE
    assert outcomes(found)["TTFT p95"] is Outcome.WORSE
    # Work takes as long as before, once it has begun.
    assert outcomes(found)["TPOT p50"] is Outcome.NO_EVIDENCE
    # Requests that pile up at a constant rate are no change of load.
    (in_flight,) = [line for line in found.load if line.measure.name == "requests in flight"]
    assert (in_flight.change or 0) > 0.5
    assert found.load_changes == ()
    assert compare(half, BEFORE).outcome is Outcome.BETTER


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rate": 6.0}, "requests/s"),
        ({"input_tokens": 80}, "input tokens"),
        # Another mix of lengths with the same mean.
        ({"long_share": 0.2, "input_tokens": 25}, "input tokens p95"),
    ],
)
def test_a_change_of_load_is_no_change_of_speed(change: Mapping[str, Any], named: str) -> None:
    found = compare(BEFORE, QueuedRun(seed=2, **change).run())
    assert found.outcome is Outcome.LOAD_CHANGED
    assert any(each.startswith(named) for each in found.load_changes)
    assert not {Outcome.BETTER, Outcome.WORSE} & set(outcomes(found).values())


def test_a_load_that_was_configured_otherwise_is_a_change_of_load() -> None:
    first, second = (
        replace(BEFORE, configured_load={"concurrency": n, "request rate": "no limit"})
        for n in ("8", "16")
    )
    assert compare(first, second).load_changes == ("concurrency 8 -> 16",)


def test_few_requests_give_no_verdict() -> None:
    short = [QueuedRun(seed=seed, length_s=10, servers=n).run() for seed, n in ((1, 8), (2, 1))]
    found = compare(*short)
    assert found.outcome is Outcome.TOO_FEW
    assert all(line.before is not None for line in found.lines if line.measure.name == "TTFT p50")
    # A 95th percentile needs more of them, and a 99th hundreds.
    longer = compare(*(QueuedRun(seed=seed, length_s=60).run() for seed in (1, 2)))
    of_ttft = [outcomes(longer)[f"TTFT {each}"] for each in ("p50", "p95", "p99")]
    assert of_ttft == [Outcome.NO_EVIDENCE, Outcome.TOO_SHORT, Outcome.TOO_FEW]
    # Each says how many times as long the runs should be, at least.
    needed = {line.measure.name: line.needed or 0 for line in longer.lines}
    assert 1 < needed["TTFT p95"] < 5
    assert needed["TTFT p99"] == 300 / 180


def test_a_run_that_is_far_longer_takes_no_more_memory() -> None:
    random = np.random.default_rng(9)
    ended_s = np.sort(random.uniform(0, BEFORE.length_s * 5000, BEFORE.requests))
    long = replace(BEFORE, length_s=BEFORE.length_s * 5000, ended_s=ended_s)
    assert compare(BEFORE, long).outcome is Outcome.TOO_FEW


def test_a_rate_that_changed_may_be_the_load_where_nobody_knows_more() -> None:
    slower = replace(BEFORE, ended_s=BEFORE.ended_s * 1.5, length_s=BEFORE.length_s * 1.5)
    late = replace(slower, e2e_s=np.full(BEFORE.requests, np.nan))
    assert compare(BEFORE, late).load_changes[0] == "requests/s -33%"


def test_failures_and_ooms_are_worse_if_they_are_known() -> None:
    failed = np.zeros(BEFORE.requests)
    failed[::10] = 1.0
    found = compare(BEFORE, replace(BEFORE, failed=failed))
    assert outcomes(found)["error ratio"] is Outcome.WORSE
    # What the client cancelled is no part of the ratio.
    cancelled = np.where(failed > 0, np.nan, 0.0)
    assert compare(BEFORE, replace(BEFORE, failed=cancelled)).outcome is Outcome.NO_EVIDENCE
    quiet, oom = (
        replace(BEFORE, events=each) for each in ({}, {"CUDA_OOM": np.arange(5.0, 150, 8)})
    )
    assert outcomes(compare(quiet, oom))["OOMs"] is Outcome.WORSE
    assert outcomes(compare(BEFORE, oom))["OOMs"] is Outcome.UNKNOWN


def minutes(seed: int, **factors: float) -> RunColumns:
    """Forty minutes, their use and their cost, each multiplied by its factor."""
    random = np.random.default_rng(seed)
    facts = {"flops": 30.0, "moved_bytes": 50.0, "bill_usd": 1.0, "output_tokens": 1e6}
    columns = {
        name: value * factors.get(name, 1.0) * random.normal(1, 0.05, 40)
        for name, value in {**facts, "good_tokens": 8e5}.items()
    }
    run = QueuedRun(seed=seed, rate=0.3, length_s=2400).run()
    times = np.linspace(0, run.length_s, 40, endpoint=False)
    possible = {name: np.full(40, 100.0) for name in ("possible_flops", "possible_bytes")}
    return replace(run, minutes=MinuteColumns(at_s=times, **columns, **possible))


def test_use_and_cost_are_of_the_minutes() -> None:
    found = compare(minutes(1), minutes(2, flops=0.8, bill_usd=1.3))
    lines = {line.measure.name: line for line in found.lines}
    assert lines["MFU"].before is not None
    assert lines["MFU"].before.value == pytest.approx(0.3, rel=0.03)
    assert lines["MFU"].outcome is Outcome.WORSE
    assert lines["MBU"].outcome is Outcome.NO_EVIDENCE
    for unit in ("output", "good"):
        line = lines[f"USD per million {unit} tokens"]
        assert line.outcome is Outcome.WORSE
        assert line.change == pytest.approx(0.3, abs=0.05)


def test_unknown_figures_are_unknown() -> None:
    nothing = np.full(BEFORE.requests, np.nan)
    found = compare(BEFORE, replace(BEFORE, met=nothing, ttft_s=nothing))
    for name in ("goodput", "attainment", "TTFT p95", "MFU", "USD per million output tokens"):
        assert outcomes(found)[name] is Outcome.UNKNOWN, name
    assert outcomes(found)["TPOT p95"] is Outcome.NO_EVIDENCE


def test_figures_without_requests_are_shown_and_not_judged() -> None:
    figures = RunFigures(name="f", requests=900, length_s=60.0, figures={"TTFT p95": 9.0})
    found = compare_figures(BEFORE, figures)
    assert found.outcome is Outcome.UNKNOWN
    (line,) = [each for each in found.lines if each.measure.name == "TTFT p95"]
    assert line.before is not None
    assert line.after is not None
    assert line.before.value == np.quantile(BEFORE.ttft_s, 0.95, method="inverted_cdf")
    assert (line.after.value, line.outcome) == (9.0, Outcome.UNKNOWN)
    assert np.isnan(line.after.high)


PAIRS = 20
FOLDER = Path(__file__).parents[2] / "data" / "comparison"
OBJECTIVE = objective(ttft_s=1.0, tpot_s=0.1)


def recorded(name: str) -> RunColumns:
    found = read_result_file(FOLDER / f"{name}.json.gz")
    assert isinstance(found, BenchedRun)
    return run_of(name, found.records, OBJECTIVE, found.load)


@cache
def compared(pair: str) -> Comparison:
    return compare(recorded(f"{pair}-before"), recorded(f"{pair}-after"))


@pytest.mark.slow
def test_the_same_settings_twice_give_no_verdict_in_19_of_20_repetitions() -> None:
    found = Counter(compared(f"same-{number:02}").outcome for number in range(PAIRS))
    # Runs of 100 requests, of which 8 run at a time, are often too short for their median.
    assert found[Outcome.NO_EVIDENCE] + found[Outcome.TOO_SHORT] >= 19, found


def test_half_the_batch_size_is_found() -> None:
    found = compared("half-00")
    assert found.outcome is Outcome.WORSE
    outcomes = {line.measure.name: line.outcome for line in found.lines}
    # Requests wait longer, and run as fast as before once they have begun.
    assert outcomes["TTFT p50"] is Outcome.WORSE
    assert outcomes["TPOT p50"] is Outcome.TOO_SHORT


def test_another_load_is_called_that() -> None:
    assert compared("load-00").load_changes[0] == "request rate 0.5 -> 1.25"
    # Also where nobody says which load was asked for.
    before, after = (
        replace(recorded(f"load-00-{side}"), configured_load={}) for side in ("before", "after")
    )
    found = compare(before, after)
    assert found.outcome is Outcome.LOAD_CHANGED
    assert found.load_changes[0].startswith("requests/s +")


# Intervals and chances, against simulations of which the truth is known

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
    far = mean_of(random.normal(size=blocks) + 3)
    assert chance(together(pair[0], far), shuffles, absolute) < 0.01


def test_correlated_blocks_vary_as_the_theory_says() -> None:
    series = autoregressive(np.random.default_rng(6), 1500, 0.6)
    # The variance of the mean of an AR(1) process is (1 + r) / (1 - r) times as large.
    assert variation(mean_of(series), 1500, 0.0).spread == pytest.approx(
        np.sqrt(1.6 / 0.4), rel=0.05
    )


@pytest.mark.parametrize("quantile", [0.5, 0.95, 0.99])
def test_a_percentile_is_that_of_numpy_in_any_mix_of_blocks(quantile: float) -> None:
    random = np.random.default_rng(7)
    places = np.sort(random.integers(0, 10, 3000))
    values = np.exp(random.normal(size=3000) + places / 5)
    values[::50] = np.nan
    known = np.isfinite(values)
    order = np.argsort(values[known])
    column = SortedColumn(values[known][order], places[known][order])
    (found,) = percentiles(quantile, [column], [10]) or ()
    assert found.value == np.quantile(values[known], quantile, method="inverted_cdf")
    of_blocks = [
        np.quantile(values[known & (places == block)], quantile, method="inverted_cdf")
        for block in range(10)
    ]
    assert found.of(np.eye(10)) == pytest.approx(np.array(of_blocks), rel=0.05)
    assert found.of(np.ones((1, 10)))[0] == pytest.approx(found.value, rel=0.03)
    nothing = SortedColumn(np.empty(0), np.empty(0, dtype=np.intp))
    assert percentiles(quantile, [nothing, column], [10, 10]) is None


def test_several_chances_are_judged_together_as_holm_does() -> None:
    # The example of Wikipedia's "Holm-Bonferroni method" (2026): only the first two are rejected.
    assert rejected([0.01, 0.04, 0.03, 0.005], 0.05) == [True, False, False, True]
