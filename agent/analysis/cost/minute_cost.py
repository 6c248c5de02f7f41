"""The cost of an engine's minute: who pays for it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np

from agent.analysis.cost.busy_split import BusySplit, busy_split
from agent.analysis.cost.phases import Array
from agent.analysis.cost.weights import Method
from agent.analysis.efficiency.busy_time import interval_parts
from agent.analysis.efficiency.engine_observation import EngineObservation
from agent.analysis.efficiency.request_activity import RequestKey, request_activities
from agent.analysis.efficiency.serving import Serving
from agent.analysis.efficiency.work import RequestWork, whole_works
from agent.records.cost_and_work import Cost
from agent.records.request import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class MinuteCost:
    """The cost of a minute, and the part of each request with work in it; `whole` is the bill."""

    cost: Cost
    requests: Mapping[RequestKey, float]
    method: Method

    def times(self, factor: float) -> "MinuteCost":
        """The same parts of another bill."""
        requests = {key: part * factor for key, part in self.requests.items()}
        return MinuteCost(cost=self.cost.times(factor), requests=requests, method=self.method)


def minute_cost(
    observed: EngineObservation, rows: Iterable[RequestRecord], serving: Serving
) -> MinuteCost:
    """Who pays for a bill of 1, by the rows that are known now.

    `rows` has one record for each request that overlaps an interval of `observed`.
    """
    works = whole_works(request_activities(rows, observed.growth.cached_share), serving)
    parts = interval_parts(observed, [work.activity for work in works])
    split = busy_split(observed, parts, works, serving)
    wasted = split.requests[np.array([work.activity.wasted for work in works], dtype=bool)]
    seconds = Cost(
        idle=fsum(part.idle_s for part in parts),
        unknown=fsum(part.unknown_s for part in parts) + split.unknown,
        unseen=split.unseen,
        aborted=_sum(wasted),
        aborted_prefill=_sum(wasted[:, :2]),
        computed=_sum(split.requests[:, 0]),
        cached=_sum(split.requests[:, 1]),
        decode=_sum(split.requests[:, 2]),
    )
    found = MinuteCost(
        cost=seconds, requests=_by_request(observed, works, split), method=split.method
    )
    return found.times(1.0 / observed.time.length_s)


def _sum(seconds: Array) -> float:
    return float(seconds.sum())


def _by_request(
    observed: EngineObservation, works: Sequence[RequestWork], split: BusySplit
) -> dict[RequestKey, float]:
    """The seconds of each request with work in the observed time."""
    found: defaultdict[RequestKey, float] = defaultdict(float)
    for work, seconds in zip(works, split.requests.sum(axis=1).tolist(), strict=True):
        if work.part_in(observed.time) is not None:
            found[work.activity.key] += seconds
    return dict(found)
