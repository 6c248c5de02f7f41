"""The API route `/objectives`: the objectives in force, their attainment and error budgets."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from functools import cache
from typing import Any

from fastapi import APIRouter
from pydantic import Field

from agent.analysis.burn_rates import error_budget
from agent.analysis.summary import TrafficLimit, check_traffic_limits, summarise
from agent.analysis.tally import Tally
from agent.outputs.api.api_context import ApiContext, ApiQueries
from agent.outputs.api.base_responses import BaseResponse, ListOf
from agent.outputs.api.query_parameters import Name, WindowText, window_before, window_s
from agent.records.queries import Selection, Window

Row = Mapping[str, Any]


class BudgetResponse(BaseResponse):
    """The error budget of an objective over its own window, which ends now."""

    window_s: float
    covered_s: float = Field(description="seconds of it since the stored data begins")
    met: int
    missed: int
    allowed: float = Field(description="misses that the target allows of those met and missed")
    left: float | None = Field(
        description="share of the allowed misses that is left, below 0 if there were more; null "
        "without judged requests"
    )


class ObjectiveResponse(BaseResponse):
    """An objective that an agent judges by now, and its attainment in the window."""

    name: str
    agent: str
    in_force_from: datetime
    definition: Mapping[str, Any]
    window_s: float
    covered_s: float = Field(description="seconds of the window since the stored data begins")
    requests: int
    met: int
    missed: int
    undetermined: int
    attainment: float | None = Field(description="met / (met + missed)")
    violations_per_min: float | None = Field(description="missed requests per covered minute")
    budget: BudgetResponse
    traffic: list[TrafficLimit]


def objective_routes(context: ApiContext) -> APIRouter:
    """The route of objectives."""
    router = APIRouter(tags=["figures"])

    @router.get("/objectives")
    def objectives(window: WindowText = "5m", agent: Name = None) -> ListOf[ObjectiveResponse]:
        """The objectives now in force, and their attainment in the last while.

        Attainment and budget are of the requests of all agents, or of the chosen one.
        """
        length_s = window_s(window, context.longest_window_s)
        found = objectives_over(context.queries, context.now(), length_s, agent or None)
        return ListOf[ObjectiveResponse](items=found)

    return router


class _CachedCounts:
    """Counts of windows, each queried once: agents of a fleet have the same objectives."""

    def __init__(self, queries: ApiQueries) -> None:
        self.grid_s = queries.grid_s
        self._data_from = cache(queries.data_from)
        self._tally = cache(queries.tally)

    def of(self, over: Window, chosen: Selection) -> tuple[float, Tally]:
        """The seconds of a window that are covered by data, and its counts."""
        covered_s = over.covered_s(self._data_from(over, chosen.source))
        return covered_s, self._tally(over, chosen)


def objectives_over(
    queries: ApiQueries, now: float, length_s: float, agent: str | None = None
) -> list[ObjectiveResponse]:
    """The objectives now in force of an agent or of all, and their attainment in `length_s`."""
    over = window_before(now, length_s, queries.grid_s(length_s))
    counts = _CachedCounts(queries)
    return [
        _objective(row, over, Selection(objective=row["name"], agent=agent), counts)
        for row in queries.objectives_in_force()
        if agent in (None, row["agent"])
    ]


def _objective(
    row: Row, over: Window, chosen: Selection, counts: _CachedCounts
) -> ObjectiveResponse:
    covered_s, tally = counts.of(over, chosen)
    figures = summarise(tally, covered_s, row["name"])
    definition = row["definition"]
    traffic = check_traffic_limits(
        figures, definition["max_error_ratio"], definition["min_output_tokens_per_s"]
    )
    return ObjectiveResponse(
        **row,
        window_s=over.length_s,
        covered_s=covered_s,
        requests=figures.requests,
        met=figures.met,
        missed=figures.missed,
        undetermined=figures.undetermined,
        attainment=figures.attainment,
        violations_per_min=figures.violations_per_min,
        budget=_budget(definition, over.until, chosen, counts),
        traffic=list(traffic),
    )


def _budget(
    definition: Row, now: float, chosen: Selection, counts: _CachedCounts
) -> BudgetResponse:
    length_s = definition["window_s"]
    over = window_before(now, length_s, counts.grid_s(length_s))
    covered_s, tally = counts.of(over, chosen)
    found = summarise(tally, over.length_s, chosen.objective or "")
    return BudgetResponse(
        window_s=over.length_s,
        covered_s=covered_s,
        **asdict(error_budget(found.met, found.missed, definition["target"])),
    )
