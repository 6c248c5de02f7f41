"""API routes of figures: the summary of a window, and its time series."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from agent.analysis.quantiles import RELATIVE_ERROR
from agent.analysis.summary import summarise
from agent.analysis.tally import ALL_OBJECTIVES, Tally
from agent.outputs.api import responses
from agent.outputs.api.api_context import ApiContext, ApiQueries
from agent.outputs.api.cause_response import cause_shares, causes_with_details
from agent.outputs.api.efficiency_response import efficiency_and_cost
from agent.outputs.api.query_parameters import (
    StepText,
    WindowText,
    selection,
    step_s,
    window_before,
    window_s,
)
from agent.records.queries import Selection, Window

Row = Mapping[str, Any]


Chosen = Annotated[Selection, Depends(selection)]


def figure_routes(context: ApiContext) -> APIRouter:
    """The routes of the summary and of the time series."""
    router = APIRouter(tags=["figures"])
    queries = context.queries

    @router.get("/summary")
    def summary(chosen: Chosen, window: WindowText = "5m") -> responses.SummaryResponse:
        """The figures of the requests that ended in the last while."""
        return summary_over(context, chosen, window_s(window, context.longest_window_s))

    @router.get("/timeseries")
    def timeseries(
        chosen: Chosen, window: WindowText = "1h", step: StepText = "1m"
    ) -> responses.ListOf[responses.StepResponse]:
        """The figures of the summary by step; the last step is not over yet."""
        length_s = window_s(window, context.longest_window_s)
        each_s = step_s(step, length_s, queries.grid_s(length_s))
        over = window_before(context.now(), length_s, each_s)
        return responses.ListOf[responses.StepResponse](
            items=list(_steps(queries, over, each_s, chosen))
        )

    return router


def summary_over(
    context: ApiContext, chosen: Selection, length_s: float
) -> responses.SummaryResponse:
    """The figures of the requests that ended in the last `length_s`."""
    queries = context.queries
    over = window_before(context.now(), length_s, queries.grid_s(length_s))
    data_from = queries.data_from(over, chosen.source)
    covered_s = over.covered_s(data_from)
    figures = _figures_of(queries.tally(over, chosen), covered_s, chosen)
    return responses.SummaryResponse(
        window_from=_utc(over.from_s),
        window_until=_utc(over.until),
        window_s=over.length_s,
        data_from=None if data_from is None else _utc(data_from),
        covered_s=covered_s,
        relative_error=RELATIVE_ERROR,
        simulated=context.simulated,
        **figures,
        **causes_with_details(queries.causes(over, chosen)),
        **efficiency_and_cost(context.minutes, over, chosen),
    )


def _figures_of(tally: Tally, covered_s: float, chosen: Selection) -> dict[str, Any]:
    return asdict(summarise(tally, covered_s, chosen.objective or ALL_OBJECTIVES))


def _steps(
    queries: ApiQueries, over: Window, step_s: int, chosen: Selection
) -> Iterator[responses.StepResponse]:
    data_from = queries.data_from(over, chosen.source)
    causes = queries.causes_by_step(over, step_s, chosen)
    for start, tally in queries.tallies_by_step(over, step_s, chosen).items():
        step = Window(from_s=start, until=min(over.until, start + step_s))
        covered_s = step.covered_s(data_from)
        yield responses.StepResponse(
            at=_utc(start),
            window_s=step.length_s,
            covered_s=covered_s,
            **_figures_of(tally, covered_s, chosen),
            **cause_shares(causes.get(start, {})),
        )


def _utc(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)
