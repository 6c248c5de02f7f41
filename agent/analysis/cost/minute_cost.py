"""The cost of an engine's minute: who pays for it."""

from dataclasses import dataclass
from math import fsum

from agent.analysis.cost.busy_split import busy_split
from agent.analysis.cost.weights import Method
from agent.analysis.efficiency.busy_time import interval_parts
from agent.analysis.efficiency.engine_observation import EngineObservation
from agent.analysis.efficiency.serving import Serving
from agent.analysis.efficiency.work import RequestWorks
from agent.records.columns import Array, Places
from agent.records.minute import Cost


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MinuteCost:
    """The cost of a minute, and the part of each request with work in it, by the ids of `rows`."""

    cost: Cost
    rows: Places
    parts: Array
    method: Method

    def times(self, factor: float) -> "MinuteCost":
        """The same parts of another bill."""
        return MinuteCost(
            cost=self.cost.times(factor),
            rows=self.rows,
            parts=self.parts * factor,
            method=self.method,
        )


def minute_cost(observed: EngineObservation, works: RequestWorks, serving: Serving) -> MinuteCost:
    """Who pays for a bill of 1, by the rows that are known now.

    `works` are whole, of all requests that overlap an interval of `observed`.
    """
    parts = interval_parts(observed, works.active)
    split = busy_split(observed, parts, works, serving)
    wasted = split.requests[:, works.active.wasted]
    computed, cached, decode = split.requests.sum(axis=1).tolist()
    seconds = Cost(
        idle=fsum(part.idle_s for part in parts),
        unknown=fsum(part.unknown_s for part in parts) + split.unknown,
        unseen=split.unseen,
        aborted=float(wasted.sum()),
        aborted_prefill=float(wasted[:2].sum()),
        computed=computed,
        cached=cached,
        decode=decode,
    )
    paying = works.have_part_in(observed.time)
    found = MinuteCost(
        cost=seconds,
        rows=works.active.rows[paying],
        parts=split.requests.sum(axis=0)[paying],
        method=split.method,
    )
    return found.times(1.0 / observed.time.length_s)
