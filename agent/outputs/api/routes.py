"""The HTTP API: bounded queries, typed responses."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, FastAPI

from agent.analysis.cause_sums import CauseSums
from agent.analysis.quantiles import RELATIVE_ERROR
from agent.analysis.summary import summarise
from agent.analysis.tally import ALL_OBJECTIVES, Tally
from agent.outputs.api import responses
from agent.outputs.api.breakdown_routes import BreakdownQueries, breakdown_routes
from agent.outputs.api.cause_response import cause_shares, causes_with_details
from agent.outputs.api.door_guard import DoorGuard
from agent.outputs.api.efficiency_response import efficiency_and_cost
from agent.outputs.api.gpu_routes import GpuQueries, gpu_routes
from agent.outputs.api.objective_routes import ObjectiveQueries, objective_routes
from agent.outputs.api.operation_routes import operation_routes
from agent.outputs.api.query_gate import QueryGate
from agent.outputs.api.query_parameters import (
    CursorText,
    Limit,
    Name,
    WindowText,
    cursor_of,
    cursor_text,
    selection,
    step_s,
    window_before,
    window_s,
)
from agent.outputs.api.refusals import REFUSALS, add_refusals
from agent.outputs.api.request_routes import RequestQueries, request_routes
from agent.outputs.api.runbook_routes import runbook_routes
from agent.records.minute import MinuteRow
from agent.records.queries import Cursor, PageOf, Selection, Window
from agent.settings.doors import Door

Row = Mapping[str, Any]


class ApiQueries(RequestQueries, GpuQueries, BreakdownQueries, ObjectiveQueries, Protocol):
    """The store's queries that the API needs."""

    def tallies_by_step(
        self, window: Window, step_s: int, selection: Selection
    ) -> dict[int, Tally]:
        """The counts of each step of a window."""

    def causes(self, window: Window, selection: Selection) -> CauseSums:
        """The sums of the causes of misses in a window."""

    def causes_by_step(
        self, window: Window, step_s: int, selection: Selection
    ) -> Mapping[int, CauseSums]:
        """The sums of the causes of each step that has any."""

    def events(
        self,
        after: Cursor | None,
        limit: int,
        *,
        engine: str | None,
        gpu: str | None,
        kind: str | None,
        confidence: str | None,
    ) -> PageOf[Row]:
        """Events, the newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext:
    """What the API serves from: the store's queries, the clock, and the other outputs.

    Windows may be up to `longest_window_s` long, and rows are kept for
    `rows_kept_s`. The store ends a query after `query_limit_s`.
    """

    queries: ApiQueries
    minutes: Callable[[Window, Selection], Sequence[MinuteRow]]
    now: Callable[[], float]
    longest_window_s: float
    rows_kept_s: float
    query_limit_s: float
    metrics: Callable[[str], tuple[bytes, str]]
    engines: Callable[[], Sequence[Row]]
    problems: Callable[[], Sequence[str]]
    parts: Callable[[], Mapping[str, str]]
    door: Door
    page: str
    documentation: str
    runbooks: Mapping[str, str]
    version: str
    simulated: bool


# A query that the store ends gets the store's own response.
_GRACE_S = 2.0

Chosen = Annotated[Selection, Depends(selection)]


def make_api(context: ApiContext) -> DoorGuard:
    """The application: page, metrics, health and `/api/v1`."""
    api = FastAPI(
        docs_url=None,
        redoc_url=None,
        title="goodput-agent",
        version=context.version,
        description="Goodput, latency and events of the watched LLM inference servers.",
    )
    pages = {"/": context.page, "/docs": context.documentation}
    api.include_router(
        operation_routes(pages, context.metrics, problems=context.problems, parts=context.parts)
    )
    api.include_router(runbook_routes(context.runbooks))
    routers = (
        _figures(context),
        breakdown_routes(
            context.queries, context.now, context.longest_window_s, context.rows_kept_s
        ),
        objective_routes(context.queries, context.now, context.longest_window_s),
        request_routes(context.queries),
        _lists(context),
        gpu_routes(context.queries, context.now, context.longest_window_s),
    )
    for router in routers:
        api.include_router(router, prefix="/api/v1", responses=dict(REFUSALS))
    add_refusals(api)
    api.add_middleware(QueryGate, within_s=context.query_limit_s + _GRACE_S)
    return DoorGuard(api, context.door)


def _figures(context: ApiContext) -> APIRouter:
    router = APIRouter(tags=["figures"])
    queries = context.queries

    @router.get("/summary")
    def summary(chosen: Chosen, window: WindowText = "5m") -> responses.SummaryResponse:
        """The figures of the requests that ended in the last while."""
        length_s = window_s(window, context.longest_window_s)
        over = window_before(context.now(), length_s, queries.grid_s(length_s))
        data_from = queries.data_from(over, chosen.engine)
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

    @router.get("/timeseries")
    def timeseries(
        chosen: Chosen, window: WindowText = "1h", step: str = "1m"
    ) -> responses.ListOf[responses.StepResponse]:
        """The figures of the summary by step; the last step is not over yet."""
        length_s = window_s(window, context.longest_window_s)
        each_s = step_s(step, length_s, queries.grid_s(length_s))
        over = window_before(context.now(), length_s, each_s)
        return responses.ListOf[responses.StepResponse](
            items=list(_steps(queries, over, each_s, chosen))
        )

    return router


def _figures_of(tally: Tally, covered_s: float, chosen: Selection) -> dict[str, Any]:
    return asdict(summarise(tally, covered_s, chosen.objective or ALL_OBJECTIVES))


def _steps(
    queries: ApiQueries, over: Window, step_s: int, chosen: Selection
) -> Iterator[responses.StepResponse]:
    data_from = queries.data_from(over, chosen.engine)
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


def _lists(context: ApiContext) -> APIRouter:
    router = APIRouter(tags=["lists"])
    queries = context.queries

    @router.get("/events")
    def events(
        *,
        engine: Name = None,
        gpu: Name = None,
        kind: Name = None,
        confidence: responses.Confidence | None = None,
        limit: Limit = 100,
        cursor: CursorText = None,
    ) -> responses.ListOf[responses.EventResponse]:
        """Events, the newest first."""
        page = queries.events(
            cursor_of(cursor),
            limit,
            engine=engine or None,
            gpu=gpu or None,
            kind=kind or None,
            confidence=confidence,
        )
        return responses.ListOf[responses.EventResponse](
            items=[responses.EventResponse(**row) for row in page.items],
            next=cursor_text(page.next),
        )

    @router.get("/engines")
    def engines() -> responses.ListOf[responses.EngineResponse]:
        """The configured engines."""
        return responses.ListOf[responses.EngineResponse](
            items=[responses.EngineResponse(**row) for row in context.engines()]
        )

    return router
