"""What is worse by itself, however much a run varies: deaths, first failures, missed targets."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import comb, exp, lgamma, sqrt
from statistics import NormalDist

import numpy as np

from agent.analysis.comparison.cells import split_runs
from agent.analysis.comparison.estimates import interval_of
from agent.analysis.comparison.measures import (
    ATTAINMENT,
    DEATH_KINDS,
    ERRORS,
    OOM_KINDS,
    OOMS,
    OTHER_FAILURES,
)
from agent.analysis.comparison.resampling import Interval, Ratio
from agent.analysis.comparison.run_columns import (
    ObjectiveBounds,
    ObjectiveColumn,
    RunColumns,
    RunFigures,
)
from agent.records.columns import Array

Run = RunColumns | RunFigures

# More improbable than this is no chance.
_LEVEL = 0.05
# Failures that are nearer are of one burst: a part of the run.
_NEAR = 1 / 100
# Of attainment near its target. With 95 % more than 5 % of equal runs with queues cross it.
_CONFIDENCE = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreDeaths:
    """Engines died, hung or ran out of memory; `at_s` by kind counts from the begin of `after`."""

    line: str
    before: int
    at_s: Mapping[str, tuple[float, ...]]

    @property
    def is_evident(self) -> bool:
        """True: fewer deaths are no fact."""
        return True

    @property
    def may_be_load(self) -> bool:
        """No load is a reason to die."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFailures:
    """Requests failed, and none did before.

    `chance` is how probable so many failures are in `after` alone if both runs have the same rate,
    and each failure is by itself; `chance_of_bursts` if those that are near in time are one. None
    if their times are unknown.
    """

    failed: int
    requests: int
    requests_before: int
    chance: float
    bursts: int | None = None
    chance_of_bursts: float = 0.0
    line: str = ERRORS

    @property
    def is_evident(self) -> bool:
        """Whether it is more than chance."""
        return max(self.chance, self.chance_of_bursts) <= _LEVEL

    @property
    def is_of_few_bursts(self) -> bool:
        """Whether it is more than chance only if failures do not come in bursts."""
        return self.chance <= _LEVEL < self.chance_of_bursts

    @property
    def may_be_load(self) -> bool:
        """A request must not fail because of load."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class MissedTarget:
    """The attainment of an objective was at its target or above, and is below.

    The intervals have a confidence of 99 %.
    """

    objective: str
    target: float
    before: Interval
    after: Interval
    line: str = ATTAINMENT

    @property
    def is_evident(self) -> bool:
        """Whether the interval of either run lies on its side of the target."""
        return self.before.low >= self.target or self.after.high < self.target

    @property
    def may_be_load(self) -> bool:
        """Under more load, attainment is lower."""
        return True


Fact = MoreDeaths | FirstFailures | MissedTarget


def facts_of(before: Run, after: Run) -> tuple[Fact, ...]:
    """All facts, those that may be chance too."""
    return (*_deaths(before, after), *_failures(before, after), *_targets(before, after))


def _deaths(before: Run, after: Run) -> Iterator[MoreDeaths]:
    first, second = before.events, after.events
    if first is None or second is None:
        return
    for line, kinds in ((OOMS, OOM_KINDS), (OTHER_FAILURES, DEATH_KINDS)):
        earlier = sum(len(first.get(kind, ())) for kind in kinds)
        at_s = {
            str(kind): tuple(second[kind].tolist()) for kind in kinds if len(second.get(kind, ()))
        }
        count = sum(map(len, at_s.values()))
        share = after.length_s / (before.length_s + after.length_s)
        # The first one is a fact. Of several in both, the rate must be higher.
        if count and (not earlier or _binomial_tail(count, earlier + count, share) <= _LEVEL):
            yield MoreDeaths(line=line, before=earlier, at_s=at_s)


def _binomial_tail(least: int, number: int, share: float) -> float:
    """How probable `least` successes or more are."""
    return sum(
        comb(number, each) * share**each * (1 - share) ** (number - each)
        for each in range(least, number + 1)
    )


def _failures(before: Run, after: Run) -> Iterator[FirstFailures]:
    first, second = _failed(before), _failed(after)
    if first is None or second is None or first[0] or not first[1] or not second[0]:
        return
    failed, requests = second
    bursts = _bursts(after) if isinstance(after, RunColumns) else None
    share = after.length_s / (before.length_s + after.length_s)
    yield FirstFailures(
        bursts=bursts,
        chance_of_bursts=0.0 if bursts is None else share**bursts,
        failed=failed,
        requests=requests,
        requests_before=first[1],
        chance=_chance_of_all(failed, requests, requests + first[1]),
    )


def _failed(run: Run) -> tuple[int, int] | None:
    """How many requests failed, and of how many it is known."""
    if isinstance(run, RunColumns):
        return int(np.nansum(run.failed)), int(np.count_nonzero(np.isfinite(run.failed)))
    ratio = run.figures.get(ERRORS)
    return None if ratio is None else (round(ratio * run.requests), run.requests)


def _bursts(run: RunColumns) -> int:
    """How often requests failed with none that failed shortly before."""
    at_s = np.sort(run.ended_s[run.failed > 0])
    return 1 + int(np.count_nonzero(np.diff(at_s) > run.length_s * _NEAR))


def _chance_of_all(failed: int, part: int, whole: int) -> float:
    """How probable it is that all failures are in a part: Fisher's exact test, one-sided."""
    logarithm = lgamma(part + 1) - lgamma(part - failed + 1)
    return min(exp(logarithm - lgamma(whole + 1) + lgamma(whole - failed + 1)), 1.0)


def _targets(before: Run, after: Run) -> Iterator[MissedTarget]:
    for name, objective in after.objectives.items():
        if name not in before.objectives:
            continue
        first = _attainment(before, before.objectives[name])
        second = _attainment(after, objective)
        if first is None or second is None:
            continue
        # Without a value, the whole interval must lie on its side of the target.
        kept = first.low if np.isnan(first.value) else first.value
        missed = second.high if np.isnan(second.value) else second.value
        if kept >= objective.target > missed:
            yield MissedTarget(objective=name, target=objective.target, before=first, after=second)


def _attainment(run: Run, objective: ObjectiveColumn | ObjectiveBounds) -> Interval | None:
    """None if it is unknown."""
    if isinstance(objective, ObjectiveBounds):
        low, high, _ = objective.attainment
        return Interval(np.nan, low, 1.0 if high is None else high)
    if not isinstance(run, RunColumns) or not np.isfinite(objective.met).any():
        return None
    return _of_requests(run, objective.met)


def _of_requests(run: RunColumns, met: Array) -> Interval:
    """The wider one of two intervals: of blocks, and of requests that are independent."""
    split, _ = split_runs(run, run)
    known = np.isfinite(met)
    figure = Ratio(split.cells.sums(met), split.cells.sums(known.astype(float)))
    of_blocks = interval_of(figure, split, _CONFIDENCE)
    low, high = _wilson(figure.value, int(np.count_nonzero(known)))
    return Interval(figure.value, min(of_blocks.low, low), min(max(of_blocks.high, high), 1.0))


def _wilson(share: float, number: int) -> tuple[float, float]:
    """The interval of a share: Wilson, "Probable inference" (1927)."""
    squared = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2) ** 2
    middle = share + squared / (2 * number)
    half = sqrt(squared * (share * (1 - share) / number + squared / (4 * number**2)))
    whole = 1 + squared / number
    return (middle - half) / whole, (middle + half) / whole
