"""What is worse by itself, what may be chance, and what one period makes alone."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import comb
from typing import Any

import numpy as np
import pytest

from agent.analysis.comparison.comparing import Comparison, Outcome, compare, compare_figures
from agent.analysis.comparison.facts import FirstFailures, MissedTarget, MoreDeaths, facts_of
from agent.analysis.comparison.run_columns import (
    ObjectiveBounds,
    ObjectiveColumn,
    RunColumns,
    RunFigures,
)
from agent.analysis.histogram_bounds import Bounds
from agent.records.event import EventKind
from tests.analysis.comparison.queue_runs import QueuedRun

BEFORE, AFTER = (replace(QueuedRun(seed=seed).run(), events={}) for seed in (1, 2))


def outcome_of(found: Comparison, name: str) -> Outcome:
    (outcome,) = [line.outcome for line in found.lines if line.measure.name == name]
    return outcome


def with_events(run: RunColumns, kind: EventKind, *at_s: float) -> RunColumns:
    return replace(run, events={kind: np.array(at_s)})


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (EventKind.ENGINE_DEAD, "other failures"),
        (EventKind.HANG, "other failures"),
        (EventKind.CUDA_OOM, "OOMs"),
        (EventKind.HOST_OOM, "OOMs"),
    ],
)
def test_one_death_or_oom_is_worse(kind: EventKind, line: str) -> None:
    found = compare(BEFORE, with_events(AFTER, kind, 60.0))
    assert (found.outcome, outcome_of(found, line)) == (Outcome.WORSE, Outcome.WORSE)
    (fact,) = found.facts
    assert isinstance(fact, MoreDeaths)
    assert (fact.before, fact.at_s) == (0, {kind: (60.0,)})


def test_a_death_is_no_matter_of_load() -> None:
    more = replace(QueuedRun(seed=2, rate=6.0).run(), events={})
    assert compare(BEFORE, more).outcome is Outcome.LOAD_CHANGED
    found = compare(BEFORE, with_events(more, EventKind.ENGINE_DEAD, 60.0))
    assert found.outcome is Outcome.WORSE
    assert found.load_changes


def test_what_was_so_before_or_is_unknown_or_no_death_is_no_fact() -> None:
    dead = EventKind.ENGINE_DEAD
    for before, after in (
        (with_events(BEFORE, dead, 5.0), with_events(AFTER, dead, 60.0, 70.0)),
        (with_events(BEFORE, dead, 5.0), AFTER),
        (replace(BEFORE, events=None), with_events(AFTER, dead, 60.0)),
        (BEFORE, with_events(AFTER, EventKind.UNREACHABLE, 60.0)),
        (BEFORE, with_events(AFTER, EventKind.RESTART, 60.0)),
    ):
        found = compare(before, after)
        assert (found.facts, found.outcome) == ((), Outcome.NO_EVIDENCE)


def test_many_more_deaths_than_before_are_worse() -> None:
    first = with_events(BEFORE, EventKind.HANG, 5.0)
    more = with_events(AFTER, EventKind.ENGINE_DEAD, *range(10, 90, 10))
    assert compare(first, more).outcome is Outcome.WORSE
    # As many in a far longer time are not, and as many in a far shorter one are.
    longer = replace(more, length_s=12 * more.length_s)
    assert facts_of(first, longer) == ()
    assert len(facts_of(longer, more)) == 1


def failing(run: RunColumns, number: int, begin: int = 0) -> RunColumns:
    failed = np.zeros(run.requests)
    failed[begin : begin + 30 * number : 30] = 1.0
    return replace(run, failed=failed)


def test_failures_that_were_none_before_are_worse_beyond_chance() -> None:
    found = compare(BEFORE, failing(AFTER, 12))
    assert (found.outcome, outcome_of(found, "error ratio")) == (Outcome.WORSE, Outcome.WORSE)
    (fact,) = found.facts
    assert isinstance(fact, FirstFailures)
    assert (fact.failed, fact.requests, fact.requests_before) == (12, 450, 450)
    # A few may be chance, and are told.
    (few,) = compare(BEFORE, failing(AFTER, 1)).facts
    assert (few.is_evident, compare(BEFORE, failing(AFTER, 1)).outcome) == (
        False,
        Outcome.NO_EVIDENCE,
    )
    # Those that come in few bursts may be, too: nobody can tell.
    burst = np.zeros(AFTER.requests)
    burst[np.argsort(AFTER.ended_s)[200:240]] = 1.0
    found = compare(BEFORE, replace(AFTER, failed=burst))
    (fact,) = found.facts
    assert isinstance(fact, FirstFailures)
    assert (fact.failed, fact.is_evident, fact.is_of_few_bursts) == (40, False, True)
    assert found.outcome is Outcome.ONE_PERIOD
    # Failures of before are no first ones.
    assert compare(failing(BEFORE, 3), failing(AFTER, 6)).facts == ()


@pytest.mark.parametrize(("failed", "after", "before"), [(1, 9, 9), (5, 450, 450), (12, 4800, 90)])
def test_the_chance_of_failures_is_that_of_fishers_exact_test(
    failed: int, after: int, before: int
) -> None:
    first, second = (
        RunFigures(name="f", requests=number, length_s=60.0, figures={"error ratio": ratio})
        for number, ratio in ((before, 0.0), (after, failed / after))
    )
    (fact,) = compare_figures(first, second).facts
    assert isinstance(fact, FirstFailures)
    # All marked ones are among those that are drawn: the hypergeometric distribution.
    exact = Fraction(comb(after, failed), comb(after + before, failed))
    assert fact.chance == pytest.approx(float(exact), rel=1e-9)


def test_first_failures_are_known_of_figures_alone() -> None:
    first, second = (
        RunFigures(name="f", requests=400, length_s=60.0, figures={"error ratio": each})
        for each in (0.0, 0.03)
    )
    found = compare_figures(first, second)
    assert (found.outcome, outcome_of(found, "error ratio")) == (Outcome.WORSE, Outcome.WORSE)
    assert compare_figures(first, first).outcome is Outcome.UNKNOWN


def with_target(run: RunColumns, missed_of_100: Sequence[int], target: float = 0.9) -> RunColumns:
    """So many of each hundred requests miss, in turn."""
    met = np.ones(run.requests)
    for place in missed_of_100:
        met[place::100] = 0.0
    return replace(run, met=met, objectives={"chat": ObjectiveColumn(target, met)})


def test_a_target_that_was_met_and_is_missed_is_worse() -> None:
    found = compare(with_target(BEFORE, [7, 50, 80]), with_target(AFTER, range(0, 99, 9)))
    assert (found.outcome, outcome_of(found, "attainment")) == (Outcome.WORSE, Outcome.WORSE)
    (fact,) = found.facts
    assert isinstance(fact, MissedTarget)
    assert (fact.objective, fact.target) == ("chat", 0.9)
    assert fact.before.low > 0.9 > fact.after.value
    # The other way round it is met again.
    assert compare(with_target(BEFORE, range(0, 99, 9)), with_target(AFTER, [7])).facts == ()


def test_a_target_that_is_crossed_within_both_intervals_may_be_chance() -> None:
    found = compare(with_target(BEFORE, range(0, 99, 11)), with_target(AFTER, range(0, 99, 9)))
    (fact,) = found.facts
    assert (fact.is_evident, found.outcome) == (False, Outcome.NO_EVIDENCE)


def test_a_target_that_is_met_exactly_is_met() -> None:
    # A tenth misses, on the dot: 45 of 450.
    exact = with_target(BEFORE, range(0, 100, 10))
    assert np.nanmean(exact.met) == 0.9
    (fact,) = facts_of(exact, with_target(AFTER, range(0, 99, 5)))
    assert isinstance(fact, MissedTarget)
    assert fact.before.value == fact.target
    assert facts_of(with_target(BEFORE, [7]), exact) == ()


def test_a_target_that_is_missed_at_another_load_is_of_the_load() -> None:
    more = QueuedRun(seed=2, rate=6.0).run()
    found = compare(with_target(BEFORE, [7]), with_target(more, range(0, 99, 5)))
    assert (len(found.facts), found.outcome) == (1, Outcome.LOAD_CHANGED)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((0.95, 0.99), (0.7, 0.85), Outcome.WORSE),
        ((0.85, 0.99), (0.7, 0.85), Outcome.UNKNOWN),
        ((0.95, 0.99), (0.7, 0.95), Outcome.UNKNOWN),
    ],
)
def test_bounds_miss_a_target_only_if_all_of_them_do(
    before: tuple[float, float], after: tuple[float, float], expected: Outcome
) -> None:
    runs = [
        RunFigures(
            name="f",
            requests=100,
            length_s=60.0,
            figures={},
            objectives={"chat": ObjectiveBounds(0.9, Bounds(*each, None))},
        )
        for each in (before, after)
    ]
    assert compare_figures(*runs).outcome is expected


def burst(run: RunColumns, begin_s: float, end_s: float) -> RunColumns:
    """The run with TTFTs of half a minute for a while."""
    inside = (run.ended_s >= begin_s) & (run.ended_s < end_s)
    return replace(run, ttft_s=np.where(inside, 30.0 + run.ttft_s, run.ttft_s))


@pytest.mark.parametrize("is_after", [True, False])
# The second one begins and ends inside a block.
@pytest.mark.parametrize(("begin_s", "end_s"), [(75.0, 86.0), (49.0, 58.5)])
def test_a_burst_that_makes_the_difference_is_named(
    is_after: bool, begin_s: float, end_s: float
) -> None:
    runs = (BEFORE, burst(AFTER, begin_s, end_s))
    found = compare(*runs) if is_after else compare(*reversed(runs))
    assert found.outcome is Outcome.ONE_PERIOD
    (line,) = [each for each in found.lines if each.measure.name == "TTFT p95"]
    assert line.period is not None
    assert line.period.is_after is is_after
    assert line.period.begin_s == pytest.approx(begin_s, abs=4.0)
    assert line.period.end_s == pytest.approx(end_s, abs=4.0)
    assert line.period.change == pytest.approx(0.0, abs=0.15)
    assert outcome_of(found, "TPOT p50") is Outcome.NO_EVIDENCE


def test_a_burst_does_not_hide_what_is_worse_everywhere() -> None:
    slow = replace(AFTER, tpot_s=AFTER.tpot_s * 1.5)
    found = compare(BEFORE, burst(slow, 75.0, 86.0))
    assert (found.outcome, outcome_of(found, "TPOT p50")) == (Outcome.WORSE, Outcome.WORSE)
    assert outcome_of(found, "TTFT p95") is Outcome.ONE_PERIOD


def test_bursts_all_the_time_are_no_matter_of_one_period() -> None:
    found = compare(BEFORE, AFTER_WITH_BURSTS)
    assert not any(line.period for line in found.lines)


def _many_bursts(run: RunColumns) -> RunColumns:
    for begin_s in range(5, 140, 20):
        run = burst(run, begin_s, begin_s + 4)
    return run


AFTER_WITH_BURSTS = _many_bursts(AFTER)


def equal_run(seed: int, target: float, error_ratio: float, **settings: Any) -> RunColumns:
    run = QueuedRun(seed=seed, **settings).run()
    failed = np.random.default_rng(seed).random(run.requests) < error_ratio
    objectives = {"chat": ObjectiveColumn(target, run.met)}
    return replace(run, failed=failed.astype(float), objectives=objectives, events={})


PAIRS = 15


@pytest.mark.slow
def test_equal_runs_are_rarely_worse() -> None:
    quiet = partial(equal_run, target=0.97, error_ratio=0.003)
    # It attains 80 +- 5 %: a target below that is often crossed.
    near_its_target = partial(equal_run, target=0.77, error_ratio=0.005, rate=6.0)
    found: Counter[Outcome] = Counter()
    for pair in range(PAIRS):
        for run in (quiet, near_its_target):
            found[compare(*(run(5000 + 2 * pair + each) for each in (0, 1))).outcome] += 1
    # At 3 %, five of 30 are one in 500; `python -m benchmarks compare_study` has 200.
    assert found[Outcome.WORSE] + found[Outcome.BETTER] < 5, found
    assert found[Outcome.ONE_PERIOD] < 5, found
