"""Which cause is named for which injected fault, of a simulated engine.

The truth is no rule's. The same requests run with and without a fault: what a request lost by the
fault is the difference of the two runs. A fault is true of a missed request if without it the
excess would be smaller by a quarter or more.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from agent.analysis.causes import EngineTimeline, explain
from agent.analysis.verdicts import Excess, excesses, judge
from agent.catalog.causes import Cause
from agent.catalog.definitions import Verdict
from agent.records.objective import Explanation, Objective
from agent.records.request import RequestRecord
from tests.analysis.causes.fault_runs import Run, Sight, simulated
from tests.analysis.causes.faults import FaultKind
from tests.analysis.causes.settings import Setting

# A fault that cost a smaller part of the excess is not its cause.
_PART = 0.25
# Worth more than any latency.
_FAILURE_S = 3600.0
# When a row comes to the agent, and when it is explained, after the request's end.
_ROW_AFTER_S, _EXPLAINED_AFTER_S = 1.0, 6.0

# A request is known by its arrival, and by its place among those of a surge.
RequestKey = tuple[float, int]


class Counts(NamedTuple):
    """The missed requests of some faults, and the causes that were named for them."""

    missed: int
    right: int
    unexplained: int
    causes: Counter[Cause]

    @property
    def wrong(self) -> int:
        """Requests with a cause that is not true of them."""
        return self.missed - self.right - self.unexplained


def counts_of(
    setting: Setting, kinds: Sequence[FaultKind], seeds: Iterable[int], *, plugin: bool
) -> Counts:
    """How often each cause was named for the requests that missed because of these faults.

    Without `plugin`, the agent has spans and samples alone.
    """
    named = [
        each for seed in seeds for each in _SeededSetting(setting, seed, plugin).named(tuple(kinds))
    ]
    return Counts(
        missed=len(named),
        right=sum(right for right, _ in named),
        unexplained=sum(cause is Cause.UNEXPLAINED for _, cause in named),
        causes=Counter(cause for _, cause in named),
    )


class _SeededSetting(NamedTuple):
    """The requests of one seed, as an agent with or without the plugin sees them."""

    setting: Setting
    seed: int
    plugin: bool

    def named(self, kinds: tuple[FaultKind, ...]) -> Iterator[tuple[bool, Cause]]:
        """For each request that missed because of the faults: whether the cause is true, and it."""
        without = {
            kind: _excess_of_all(self, tuple(other for other in kinds if other is not kind))
            for kind in kinds
        }
        plain = _excess_of_all(self, ())
        objective = self.setting.objective
        sight = self.run(kinds).sight(proxy=self.plugin)
        for key, record, found in explained(sight, objective, plugin=self.plugin):
            still_s = (1 - _PART) * _excess_s(record, objective)
            if plain.get(key, 0.0) > still_s:
                continue
            guilty = [kind for kind in kinds if without[kind].get(key, 0.0) <= still_s] or kinds
            yield any(found.top in kind.causes for kind in guilty), found.top

    def run(self, kinds: tuple[FaultKind, ...]) -> Run:
        """The run with these faults."""
        return _run(self.setting, kinds, self.seed)


@lru_cache(maxsize=32)
def _run(setting: Setting, kinds: tuple[FaultKind, ...], seed: int) -> Run:
    return simulated([kind.fault for kind in kinds], seed, setting.scenario)


@lru_cache(maxsize=64)
def _excess_of_all(seeded: _SeededSetting, kinds: tuple[FaultKind, ...]) -> dict[RequestKey, float]:
    requests = seeded.run(kinds).sight(proxy=seeded.plugin).requests
    objective = seeded.setting.objective
    return {key: _excess_s(record, objective) for key, record in _keyed(requests)}


def _keyed(records: Iterable[RequestRecord]) -> Iterator[tuple[RequestKey, RequestRecord]]:
    """In the order of the requests' numbers: the first of a surge is the request without it."""
    copies: Counter[float] = Counter()
    for record in sorted(records, key=lambda each: int(each.span_id, 16)):
        at = record.started_at
        yield (at, copies[at]), record
        copies[at] += 1


def _broken(record: RequestRecord, objective: Objective) -> Sequence[Excess]:
    return excesses(record, objective) if judge(record, objective) is Verdict.MISSED else ()


def _excess_s(record: RequestRecord, objective: Objective) -> float:
    broken = _broken(record, objective)
    return sum(_FAILURE_S if each.seconds is None else each.seconds for each in broken)


def explained(
    sight: Sight, objective: Objective, *, plugin: bool
) -> Iterator[tuple[RequestKey, RequestRecord, Explanation]]:
    """Each missed request explained, from what an agent knows some seconds after its end."""
    timeline = EngineTimeline()
    if sight.died_at is not None:
        timeline.died(sight.died_at, "ENGINE_DEAD")
    took: list[tuple[float, Callable[[], None]]] = [
        *((each.at, partial(timeline.host, each)) for each in sight.hosts),
        *((each.at, partial(timeline.gpu, each.at, [each])) for each in sight.gpus),
        *((each.at, partial(timeline.sample, each)) for each in sight.samples),
        *((r.ended_at + _ROW_AFTER_S, partial(timeline.request, r)) for r in sight.requests),
        *((s.ended_at, partial(timeline.step, s)) for s in (sight.steps if plugin else ())),
    ]
    took.sort(key=lambda each: each[0])
    missed = [pair for pair in _keyed(sight.requests) if _broken(pair[1], objective)]
    missed.sort(key=lambda pair: pair[1].ended_at)
    upcoming = iter(took)
    at, take = next(upcoming)
    for key, record in missed:
        while at <= record.ended_at + _EXPLAINED_AFTER_S:
            take()
            at, take = next(upcoming, (float("inf"), take))
        ended = sight.ended.get(record.span_id) if plugin else None
        yield key, record, explain(record, [objective], timeline, ended)
