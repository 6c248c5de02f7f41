"""Whether a named cause is true, by runs of the same requests without it. Any engine's runs do.

The truth does not come from a rule. The same requests run with and without a factor, such as a
fault: what a request lost by the factor is the difference of the two runs. A factor is true of a
missed request if without it the excess would be smaller by a quarter or more. So is what the usual
traffic always has, such as packs of requests, if the same requests without that show it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from agent.analysis.causes import EngineTimeline, explain
from agent.analysis.verdicts import Excess, excesses, judge
from agent.catalog.causes import Cause
from agent.catalog.definitions import Verdict
from agent.records.objective import Explanation, Objective
from agent.records.request import RequestRecord
from tests.analysis.causes.fault_runs import Sight

# A factor that cost a smaller part of the excess is not its cause.
_PART = 0.25
# A cause with a smaller part of the seconds is not seen beside the first.
_NAMED_PART = 0.1
# Worth more than any latency.
_FAILURE_S = 3600.0
# When a row comes to the agent, and when it is explained, after the request's end.
_ROW_AFTER_S, _EXPLAINED_AFTER_S = 1.0, 6.0

# What a request is known by in every run.
RequestKey = tuple[float, int]
Known = Callable[[Iterable[RequestRecord]], Iterable[tuple[RequestKey, RequestRecord]]]


class Guilt(Protocol):
    """A factor, and the causes that are true of a request that missed because of it."""

    @property
    def causes(self) -> Collection[str]: ...


_Kind = TypeVar("_Kind", bound=Guilt)


class Judged(NamedTuple):
    """A request that missed because of some factors, its explanation, and the factors that are true
    of it, those of the usual traffic by themselves."""

    record: RequestRecord
    found: Explanation
    guilty: Sequence[Guilt]
    usual: Sequence[Guilt] = ()

    @property
    def right(self) -> bool:
        """Whether the first cause is true."""
        return any(self.found.top in each.causes for each in (*self.guilty, *self.usual))

    @property
    def all_named(self) -> bool:
        """Whether each factor that is true of it is charged with a part of the seconds."""
        charged: defaultdict[str, float] = defaultdict(float)
        for share in self.found.shares:
            charged[share.cause.value] += share.excess_s or 0.0
        least_s = _NAMED_PART * sum(charged.values())
        return all(sum(charged[c] for c in each.causes) >= least_s for each in self.guilty)


class Counts(NamedTuple):
    """The missed requests of some factors, and the causes that were named for them."""

    missed: int
    right: int
    unexplained: int
    causes: Counter[Cause]

    @property
    def wrong(self) -> int:
        """Requests with a cause that is not true of them."""
        return self.missed - self.right - self.unexplained


def counted(judged: Iterable[Judged]) -> Counts:
    """How often each cause was named."""
    every = [(each.right, each.found.top) for each in judged]
    return Counts(
        missed=len(every),
        right=sum(right for right, _ in every),
        unexplained=sum(cause is Cause.UNEXPLAINED for _, cause in every),
        causes=Counter(cause for _, cause in every),
    )


class Counterfactual(Generic[_Kind]):
    """The same requests with any of some factors, as one agent sees them."""

    def __init__(
        self,
        sight: Callable[[tuple[_Kind, ...]], Sight],
        objective: Objective,
        *,
        plugin: bool,
        without: Sequence[_Kind] = (),
        known: Known | None = None,
    ) -> None:
        """`sight` runs the requests with these factors. Without `plugin`, the agent does not get
        the steps and ended requests of a sight. Each of `without` takes something away that the
        usual traffic has, and has the causes that this is. A request is known by its arrival if
        nothing else is said."""
        self._sight = sight
        self._objective = objective
        self._plugin = plugin
        self._without = without
        self._known = known or by_arrival
        self._excesses: dict[tuple[_Kind, ...], dict[RequestKey, float]] = {}

    def judged(self, kinds: tuple[_Kind, ...]) -> Iterator[Judged]:
        """Each request that missed because of these factors, explained."""
        without = {
            kind: self._excess(tuple(other for other in kinds if other is not kind))
            for kind in kinds
        }
        usual = {kind: self._excess((*kinds, kind)) for kind in self._without}
        plain = self._excess(())
        sight = self._sight(kinds)
        missed = self._known(sight.requests)
        for key, record, found in explained(sight, missed, self._objective, plugin=self._plugin):
            still_s = (1 - _PART) * _excess_s(record, self._objective)
            if plain.get(key, 0.0) > still_s:
                continue
            guilty, also = _smaller(without, key, still_s), _smaller(usual, key, still_s)
            yield Judged(record, found, guilty or kinds, also)

    def _excess(self, kinds: tuple[_Kind, ...]) -> dict[RequestKey, float]:
        known = self._excesses.get(kinds)
        if known is None:
            requests = self._sight(kinds).requests
            by_key = self._known(requests)
            known = {key: _excess_s(record, self._objective) for key, record in by_key}
            self._excesses[kinds] = known
        return known


def _smaller(
    without: Mapping[_Kind, Mapping[RequestKey, float]], key: RequestKey, still_s: float
) -> list[_Kind]:
    """The factors without which the excess of a request is no longer than this."""
    return [kind for kind, excesses_s in without.items() if excesses_s.get(key, 0.0) <= still_s]


def by_number(records: Iterable[RequestRecord]) -> Iterator[tuple[RequestKey, RequestRecord]]:
    """Requests that have the same number in all runs."""
    return (((0.0, int(record.trace_id, 16)), record) for record in records)


def by_arrival(records: Iterable[RequestRecord]) -> Iterator[tuple[RequestKey, RequestRecord]]:
    """By their arrivals, and by their places among those of a surge.

    In the order of the requests' numbers: the first of a surge is the request without it.
    """
    copies: Counter[float] = Counter()
    for record in sorted(records, key=lambda each: int(each.trace_id, 16)):
        at = record.started_at
        yield (at, copies[at]), record
        copies[at] += 1


def _broken(record: RequestRecord, objective: Objective) -> Sequence[Excess]:
    return excesses(record, objective) if judge(record, objective) is Verdict.MISSED else ()


def _excess_s(record: RequestRecord, objective: Objective) -> float:
    broken = _broken(record, objective)
    return sum(_FAILURE_S if each.seconds is None else each.seconds for each in broken)


def explained(
    sight: Sight,
    requests: Iterable[tuple[RequestKey, RequestRecord]],
    objective: Objective,
    *,
    plugin: bool,
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
    missed = [pair for pair in requests if _broken(pair[1], objective)]
    missed.sort(key=lambda pair: pair[1].ended_at)
    upcoming = iter(took)
    at, take = next(upcoming)
    for key, record in missed:
        while at <= record.ended_at + _EXPLAINED_AFTER_S:
            take()
            at, take = next(upcoming, (float("inf"), take))
        ended = sight.ended.get(record.span_id) if plugin else None
        yield key, record, explain(record, [objective], timeline, ended)
