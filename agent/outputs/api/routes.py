"""The HTTP API: its routes, and the live figures of open pages."""

import asyncio
from collections.abc import AsyncIterator, Callable

from fastapi import APIRouter, FastAPI, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent

from agent.errors import StoreUnavailable
from agent.outputs.api.api_context import ApiContext
from agent.outputs.api.base_responses import BaseResponse
from agent.outputs.api.efficiency_routes import efficiency_routes
from agent.outputs.api.figure_routes import (
    SummaryResponse,
    breakdown_routes,
    figure_routes,
    length_routes,
    summary_over,
)
from agent.outputs.api.list_routes import (
    AgentResponse,
    EngineResponse,
    GpuResponse,
    agent_responses,
    agent_routes,
    engine_routes,
    event_routes,
    gpu_response,
    gpu_routes,
)
from agent.outputs.api.middleware import AccessGuard, QueryGate
from agent.outputs.api.objective_routes import ObjectiveResponse, objective_routes, objectives_over
from agent.outputs.api.operation_routes import add_page, operation_routes, runbook_routes
from agent.outputs.api.query_parameters import REFUSALS, add_refusals
from agent.outputs.api.request_routes import request_routes
from agent.records.queries import Selection
from agent.settings.access import AccessPolicy

EVERY_S = 2.0
# Each has a connection, and a place among the queries that may run at once.
MOST_VIEWERS = 50


class LiveResponse(BaseResponse):
    """What a page shows of now."""

    summary: SummaryResponse
    objectives: list[ObjectiveResponse]
    engines: list[EngineResponse]
    gpus: list[GpuResponse]
    agents: list[AgentResponse]


class LiveFigures:
    """The newest figures as JSON, read once in a while for all viewers together.

    They are read in a thread, and only while there is a viewer. `stop` ends every stream.
    """

    def __init__(self, read: Callable[[], LiveResponse]) -> None:
        self._read = read
        self._reading = asyncio.Lock()
        self._stopped = asyncio.Event()
        self._read_at = float("-inf")
        self._newest = ServerSentEvent()
        self._viewers = 0

    def stop(self) -> None:
        """End every stream, and those to come at once."""
        self._stopped.set()

    async def stream(self, may_read: Callable[[], bool]) -> AsyncIterator[ServerSentEvent]:
        """Figures until the viewer leaves or may no longer read.

        A viewer beyond the limit gets an error.
        """
        if self._viewers >= MOST_VIEWERS:
            yield _live_problem(f"{MOST_VIEWERS} pages are open already; this one is not live")
            return
        self._viewers += 1
        try:
            while not self._stopped.is_set() and may_read():
                yield await self._event()
                await self._pause()
        finally:
            self._viewers -= 1

    async def _event(self) -> ServerSentEvent:
        async with self._reading:
            now = asyncio.get_running_loop().time()
            if now - self._read_at >= EVERY_S / 2:
                self._newest = await asyncio.to_thread(self._read_event)
                self._read_at = now
            return self._newest

    def _read_event(self) -> ServerSentEvent:
        try:
            return ServerSentEvent(event="figures", raw_data=self._read().model_dump_json())
        except StoreUnavailable as error:
            return _live_problem(error.public)

    async def _pause(self) -> None:
        waiting = asyncio.create_task(self._stopped.wait())
        await asyncio.wait({waiting}, timeout=EVERY_S)
        waiting.cancel()


def _live_problem(sentence: str) -> ServerSentEvent:
    return ServerSentEvent(event="problem", data=sentence)


def live_routes(live: LiveFigures, access: AccessPolicy) -> APIRouter:
    """The route of the live figures."""
    router = APIRouter(tags=["figures"])

    # OpenAPI cannot say what the data of the events is.
    @router.get("/live", response_class=EventSourceResponse, include_in_schema=False)
    async def figures(request: Request) -> AsyncIterator[ServerSentEvent]:
        """Server-sent events: `figures` every two seconds, or a `problem` in one sentence."""
        token = request.headers.get("authorization")
        # The token was valid at the start, and may be removed from its file since.
        async for event in live.stream(lambda: access.is_authorized(token)):
            yield event

    return router


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
            engines=[EngineResponse(**row) for row in context.engines()],
            gpus=[gpu_response(row) for row in queries.newest_gpu_samples(now)],
            agents=agent_responses(queries),
        )

    return LiveFigures(read)


def make_api(context: ApiContext, live: LiveFigures) -> AccessGuard:
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
    return AccessGuard(api, context.access)


def _routers(context: ApiContext, live: LiveFigures) -> tuple[APIRouter, ...]:
    """Those below /api/v1."""
    return (
        figure_routes(context),
        live_routes(live, context.access),
        efficiency_routes(context),
        breakdown_routes(context),
        length_routes(context),
        objective_routes(context),
        request_routes(context.queries),
        event_routes(context),
        engine_routes(context),
        gpu_routes(context),
        agent_routes(context.queries),
    )
