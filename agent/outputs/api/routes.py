"""The HTTP API: bounded queries, typed responses."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI

from agent.outputs.api import responses
from agent.outputs.api.agent_routes import agent_responses, agent_routes
from agent.outputs.api.api_context import ApiContext, ApiQueries
from agent.outputs.api.breakdown_routes import breakdown_routes
from agent.outputs.api.door_guard import DoorGuard
from agent.outputs.api.efficiency_routes import efficiency_routes
from agent.outputs.api.figure_routes import figure_routes, summary_over
from agent.outputs.api.gpu_routes import gpu_response, gpu_routes
from agent.outputs.api.length_routes import length_routes
from agent.outputs.api.live_routes import LiveFigures, LiveResponse, live_routes
from agent.outputs.api.objective_routes import objective_routes, objectives_over
from agent.outputs.api.operation_routes import operation_routes
from agent.outputs.api.page_routes import add_page
from agent.outputs.api.query_gate import QueryGate
from agent.outputs.api.query_parameters import (
    CursorText,
    Limit,
    Name,
    WindowText,
    cursor_of,
    cursor_text,
    window_s,
)
from agent.outputs.api.refusals import REFUSALS, add_refusals
from agent.outputs.api.request_routes import request_routes
from agent.outputs.api.runbook_routes import runbook_routes
from agent.records.queries import Selection

# The window of the live figures.
_LIVE_S = 300.0

# A query that the store ends gets the store's own response.
_GRACE_S = 2.0


def live_figures(context: ApiContext) -> LiveFigures:
    """What open pages show, of the last five minutes."""

    def read() -> LiveResponse:
        queries, now = context.queries, context.now()
        return LiveResponse(
            summary=summary_over(context, Selection(), _LIVE_S),
            objectives=objectives_over(queries, now, _LIVE_S),
            engines=[responses.EngineResponse(**row) for row in context.engines()],
            gpus=[gpu_response(row) for row in queries.newest_gpu_samples(now)],
            agents=agent_responses(queries),
        )

    return LiveFigures(read)


def make_api(context: ApiContext, live: LiveFigures) -> DoorGuard:
    """The application: page, metrics, health and `/api/v1`."""
    api = FastAPI(
        docs_url=None,
        redoc_url=None,
        title="goodput-agent",
        version=context.version,
        description="Goodput, latency and events of the watched LLM inference servers.",
    )
    api.include_router(
        operation_routes(
            {"/docs": context.documentation},
            context.metrics,
            problems=context.problems,
            parts=context.parts,
        )
    )
    add_page(api, simulated=context.simulated)
    api.include_router(runbook_routes(context.runbooks))
    for router in _routers(context, live):
        api.include_router(router, prefix="/api/v1", responses=dict(REFUSALS))
    add_refusals(api)
    api.add_middleware(QueryGate, within_s=context.query_limit_s + _GRACE_S)
    return DoorGuard(api, context.door)


def _routers(context: ApiContext, live: LiveFigures) -> tuple[APIRouter, ...]:
    """Those below /api/v1."""
    queries, now, longest_s = context.queries, context.now, context.longest_window_s
    kept_s = context.rows_kept_s
    return (
        figure_routes(context),
        live_routes(live, context.door),
        efficiency_routes(context.minutes, now, queries.grid_s, longest_s),
        breakdown_routes(queries, now, longest_s, kept_s),
        length_routes(queries, now, min(kept_s, longest_s)),
        objective_routes(queries, now, longest_s),
        request_routes(queries),
        _events(queries, now, longest_s),
        _engines(context.engines),
        gpu_routes(queries, now, longest_s),
        agent_routes(queries),
    )


def _events(queries: ApiQueries, now: Callable[[], float], longest_s: float) -> APIRouter:
    router = APIRouter(tags=["lists"])

    @router.get("/events")
    def events(
        *,
        agent: Name = None,
        engine: Name = None,
        gpu: Name = None,
        kind: Name = None,
        confidence: responses.Confidence | None = None,
        window: WindowText | None = None,
        limit: Limit = 100,
        cursor: CursorText = None,
    ) -> responses.ListOf[responses.EventResponse]:
        """Events of the window, or of all time without one, the newest first."""
        page = queries.events(
            cursor_of(cursor),
            limit,
            since=None if not window else now() - window_s(window, longest_s),
            agent=agent or None,
            engine=engine or None,
            gpu=gpu or None,
            kind=kind or None,
            confidence=confidence,
        )
        return responses.ListOf[responses.EventResponse](
            items=[responses.EventResponse(**row) for row in page.items],
            next=cursor_text(page.next),
        )

    return router


def _engines(watched: Callable[[], Sequence[Mapping[str, Any]]]) -> APIRouter:
    router = APIRouter(tags=["lists"])

    @router.get("/engines")
    def engines(agent: Name = None) -> responses.ListOf[responses.EngineResponse]:
        """The engines of this agent; of `serve` those of every agent."""
        return responses.ListOf[responses.EngineResponse](
            items=[
                responses.EngineResponse(**row)
                for row in watched()
                if agent in (None, "", row["agent"])
            ]
        )

    return router
