"""How often `compare` is right, on simulated runs of which the truth is known.

Days are of traffic with a day's pattern and queues; other runs are Poisson, queued or bursty.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from agent.analysis.comparison.cells import split_runs
from agent.analysis.comparison.comparing import Outcome, compare
from agent.analysis.comparison.days import evidence_of
from agent.analysis.comparison.measures import MEASURES
from agent.analysis.comparison.run_columns import RunColumns
from tests.analysis.comparison.day_runs import DayTraffic, slower
from tests.analysis.comparison.queue_runs import BurstyRun, QueuedRun

PAIRS_OF_DAYS = 40
FOUND_TARGET = 30
EQUAL_PAIRS = 200
MOST_FALSE = 0.05
COVERED = (0.88, 0.98)
# Runs without an interval are said to be too short. If most are, the others are the unlucky ones.
_MOST_SHORT = 0.5
_MOST_WRONG = 0.12
_RUNS = 100

_Found = Counter[Outcome]


def run() -> bool:
    """Print the tables; return whether all targets are met."""
    return all([_days(), _equal_days(), _equal_runs(), _coverage()])


def _days() -> bool:
    """Whether changes of a day are found, and none where there is none."""
    days = DayTraffic(seed=7, days=PAIRS_OF_DAYS + 1, requests_per_day=20_000).runs()
    found = {factor: _outcomes(days, factor) for factor in (1.0, 1.2, 2.0)}
    for factor, counts in found.items():
        print(f"compare_study, {PAIRS_OF_DAYS} pairs of days, TTFT times {factor}: {_text(counts)}")
    return (
        found[1.0][Outcome.WORSE] == 0
        and found[1.2][Outcome.WORSE] >= FOUND_TARGET
        and found[2.0][Outcome.WORSE] == PAIRS_OF_DAYS
    )


def _outcomes(days: Sequence[RunColumns], factor: float) -> _Found:
    return Counter(
        compare(first, slower(second, factor)).outcome for first, second in pairwise(days)
    )


def _equal_days() -> bool:
    days = DayTraffic(seed=8, days=EQUAL_PAIRS + 1, requests_per_day=8_000).runs()
    counts = _outcomes(days, 1.0)
    print(f"compare_study, {EQUAL_PAIRS} pairs of equal days: {_text(counts)}")
    return _few_false(counts)


def _equal_runs() -> bool:
    kinds: dict[str, Callable[..., QueuedRun | BurstyRun]] = {
        "queue, 40 % busy": partial(QueuedRun, length_s=600.0),
        "queue, 75 % busy": partial(QueuedRun, length_s=600.0, rate=6.0),
        "bursts each minute": partial(BurstyRun, length_s=1800.0, gap_s=60.0),
    }
    good = True
    for name, kind in kinds.items():
        counts = Counter(
            compare(kind(seed=pair).run(), kind(seed=pair + 1).run()).outcome
            for pair in range(1, 2 * EQUAL_PAIRS, 2)
        )
        print(f"compare_study, {EQUAL_PAIRS} equal pairs, {name}: {_text(counts)}")
        good = good and _few_false(counts)
    return good


def _few_false(counts: _Found) -> bool:
    return counts[Outcome.WORSE] + counts[Outcome.BETTER] < MOST_FALSE * counts.total()


def _text(counts: _Found) -> str:
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())


def _coverage() -> bool:
    """Whether intervals hold the truth as often as they say, or runs are said to be too short."""
    good = True
    for length_s in (600.0, 1800.0, 7200.0):
        for name, gap_s, burst_s in (
            ("Poisson", None, 6.0),
            ("bursts of 6 s each minute", 60.0, 6.0),
            ("bursts of 60 s each 3 minutes", 120.0, 60.0),
        ):
            kind = partial(BurstyRun, gap_s=gap_s, burst_s=burst_s)
            good = _covered(kind, length_s, name) and good
    return good


def _covered(kind: Callable[..., BurstyRun], length_s: float, name: str) -> bool:
    long = kind(seed=0, length_s=500_000.0).run()
    runs = [kind(seed=seed, length_s=length_s).run() for seed in range(1, _RUNS + 1)]
    splits = [split_runs(each, each) for each in runs]
    cells, good = [], True
    for measure in (each for each in MEASURES if each.name.startswith(("TTFT", "TPOT"))):
        column = "ttft_s" if measure.name.startswith("TTFT") else "tpot_s"
        truth = float(np.quantile(getattr(long, column), measure.quantile or 0.0))
        counts: Counter[bool | None] = Counter()
        for split in splits:
            evidence = evidence_of(measure, split)
            if evidence is not None:
                _, low, high = evidence.before.interval
                known = bool(np.isfinite([low, high]).all())
                counts[low <= truth <= high if known else None] += 1
        share = counts[True] / max(_RUNS - counts[None], 1)
        cells.append(f"{measure.name} {share:.0%} ({counts[None]} too short)")
        if counts[None] > _MOST_SHORT * _RUNS:
            good = good and counts[False] <= _MOST_WRONG * _RUNS
        else:
            good = good and share >= COVERED[0]
    print(f"compare_study, {length_s / 60:.0f} min, {name}: {', '.join(cells)}")
    return good
