"""The HTTP API: its routes, those that operate the agent, and the live figures of open pages."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import Any, Literal

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, PlainTextResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.middleware.gzip import GZipMiddleware
from starlette.staticfiles import StaticFiles

from agent.analysis.summary import summarise
from agent.errors import StoreUnavailable
from agent.outputs.api.alert_routes import alert_routes
from agent.outputs.api.api_context import ApiContext, ApiQueries
from agent.outputs.api.base_responses import BaseResponse
from agent.outputs.api.beside_routes import beside_routes
from agent.outputs.api.breakdown_routes import breakdown_routes
from agent.outputs.api.conversation_routes import conversation_routes
from agent.outputs.api.efficiency_routes import efficiency_routes
from agent.outputs.api.figure_routes import figure_routes, length_routes, objective_routes
from agent.outputs.api.list_routes import (
    AgentResponse,
    EngineResponse,
    GpuResponse,
    agent_responses,
    agent_routes,
    engine_responses,
    engine_routes,
    event_routes,
    gpu_routes,
    name_routes,
    newest_gpus,
)
from agent.outputs.api.middleware import AccessGuard, QueryGate
from agent.outputs.api.pool_routes import pool_routes
from agent.outputs.api.probe_routes import probe_routes
from agent.outputs.api.problems import (
    PROBLEM,
    PROBLEM_JSON,
    REFUSALS,
    DocumentedApi,
    add_problems,
    refuse_unknown,
)
from agent.outputs.api.query_parameters import (
    window_before,
)
from agent.outputs.api.request_routes import request_routes
from agent.outputs.api.scatter_routes import contrast_routes, scatter_routes
from agent.outputs.api.start_routes import start_routes
from agent.outputs.api.timeline_routes import load_routes, timeline_routes
from agent.outputs.web import (
    API_POLICY,
    ASSETS_PATH,
    DOCUMENT_POLICY,
    PAGE_POLICY,
    api_page,
    first_page,
)
from agent.outputs.web.documents import RUNBOOKS, Documents, html_document, known_labels
from agent.records.queries import Selection, Window
from agent.settings.access import AccessPolicy


class HealthResponse(BaseResponse):
    """Whether the agent can work, and what prevents it."""

    status: Literal["ok", "not ready"]
    problems: list[str]


class ReadinessResponse(HealthResponse):
    """The same, and each part of the agent in words."""

    parts: dict[str, str]


_LOG = logging.getLogger(__name__)
# FastAPI cannot know the content types of a response that is not JSON.
_EXPOSITION: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            media_type: {"schema": {"type": "string"}}
            for media_type in ("text/plain", "application/openmetrics-text")
        }
    }
}


class _MetricsPage:
    """Serves the exposition; `problems` says why the last one could not be made, by part."""

    def __init__(self, render: Callable[[str], tuple[bytes, str]]) -> None:
        self._render = render
        # Its own thread: queries that wait for the database may take all the others.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="metrics")
        self.problems: dict[str, str] = {}

    async def response(self, accept: str) -> Response:
        loop = asyncio.get_running_loop()
        try:
            body, content_type = await loop.run_in_executor(self._thread, self._render, accept)
        except Exception as error:
            if not self.problems:
                _LOG.exception("the exposition cannot be made; logged once until it can")
            problem = f"/metrics fails: {type(error).__name__}: {error}"
            self.problems["metrics"] = problem
            return Response(problem, 500, media_type="text/plain")
        self.problems.clear()
        return Response(body, headers={"Content-Type": content_type})


def operation_routes(
    metrics: Callable[[str], tuple[bytes, str]],
    *,
    problems: Callable[[], Sequence[str]],
    parts: Callable[[], Mapping[str, str]],
) -> APIRouter:
    """The routes of the exposition, and of the agent's health.

    `problems` and `parts` never wait: they are called in the event loop.
    """
    router = APIRouter(tags=["operations"])
    scraped = _MetricsPage(metrics)

    @router.get("/metrics", response_class=Response, responses=_EXPOSITION)
    async def exposition(request: Request) -> Response:
        """The exposition: Prometheus text, or OpenMetrics with exemplars if accepted."""
        return await scraped.response(request.headers.get("accept", ""))

    @router.get("/healthz")
    async def healthz() -> HealthResponse:
        """Answers while the process lives, even if every thread waits for the database."""
        return HealthResponse(status="ok", problems=[])

    @router.get("/readyz", responses={503: {"model": ReadinessResponse}})
    async def readyz(response: Response) -> ReadinessResponse:
        """Whether spans can be received and stored: what the last writes did, and each part."""
        found = list(problems())
        response.status_code = 503 if found else 200
        status: Literal["ok", "not ready"] = "not ready" if found else "ok"
        texts = {**parts(), **scraped.problems}
        return ReadinessResponse(status=status, problems=found, parts=texts)

    return router


ASSETS = "/assets"


def add_page(api: FastAPI, *, simulated: bool) -> None:
    """Serve the page, and the API's reference with try-out."""
    pages = {"/": (first_page(simulated=simulated), PAGE_POLICY)}
    pages["/docs/api"] = (api_page(), API_POLICY)
    for path, (page, policy) in pages.items():
        api.add_api_route(path, _shown(page, policy), include_in_schema=False)
    api.mount(ASSETS, StaticFiles(directory=ASSETS_PATH))


def _shown(page: str, policy: str) -> Callable[[], Awaitable[HTMLResponse]]:
    async def show() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    return show


_TEXT = {"schema": {"type": "string"}}
_RUNBOOK: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": _TEXT, "text/html": _TEXT}},
    404: {
        "description": "there is no such runbook",
        "content": {PROBLEM_JSON: PROBLEM},
    },
}


def document_routes(found: Documents) -> APIRouter:
    """Routes that serve these pages and pictures, and nothing else."""
    router = APIRouter(tags=["operations"])

    @router.get("/runbooks/{name:path}", response_class=PlainTextResponse, responses=_RUNBOOK)
    def runbook(name: str, request: Request) -> Response:
        """The page on an alert: HTML for a browser, else Markdown; README.md lists them all.

        Labels of the alert, such as `engine`, are filled in.
        """
        path = f"{RUNBOOKS}{name}"
        if found.markdown(path) is None:
            raise HTTPException(404, f"there is no runbook {name!r}; see /runbooks/README.md")
        return _document(found, path, request)

    @router.get("/docs", include_in_schema=False)
    def first(request: Request) -> Response:
        """The first page of the documentation."""
        return _document(found, "index.md", request)

    @router.get("/docs/{name:path}", include_in_schema=False)
    def document(name: str, request: Request) -> Response:
        """A page of the documentation, or a picture in one."""
        return _document(found, name, request)

    return router


def _document(found: Documents, name: str, request: Request) -> Response:
    markdown = found.markdown(name)
    if markdown is not None:
        # Programs that read Markdown name no type, or all of them.
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(markdown, headers={"Vary": "Accept"})
        page = html_document(name, markdown, known_labels(request.query_params))
        headers = {"Content-Security-Policy": DOCUMENT_POLICY, "Vary": "Accept"}
        return HTMLResponse(page, headers=headers)
    if (path := found.path(name)) is not None:
        return FileResponse(path)
    raise HTTPException(404, f"there is no page {name!r}; see /docs")


EVERY_S = 2.0
# Each has a connection, and is one of the queries that may run at once.
MOST_VIEWERS = 50


class LatelyResponse(BaseResponse):
    """The verdicts on the requests that ended in the last minutes."""

    window_s: float
    met: int
    missed: int


class LiveResponse(BaseResponse):
    """What a page shows of now. It is read every two seconds, so it has nothing else."""

    lately: LatelyResponse
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
# A smaller response is one packet or few anyway. This level saves most of what gzip can save, in a
# fifth of the time of its highest.
_LARGE_BYTES, _GZIP_LEVEL = 4096, 1
# A query that the store ends gets the store's own response.
_GRACE_S = 2.0


def live_figures(context: ApiContext) -> LiveFigures:
    """What open pages show, of the last five minutes."""

    def figures(queries: ApiQueries) -> LiveResponse:
        now = context.now()
        over = window_before(now, _LIVE_S, queries.grid_s(_LIVE_S))
        return LiveResponse(
            lately=_lately(queries, over),
            engines=engine_responses(context),
            gpus=newest_gpus(context, queries),
            agents=agent_responses(queries),
        )

    return LiveFigures(lambda: context.read(figures))


def _lately(queries: ApiQueries, over: Window) -> LatelyResponse:
    figures = summarise(queries.tally(over, Selection()), over.length_s)
    return LatelyResponse(window_s=over.length_s, met=figures.met, missed=figures.missed)


def make_api(context: ApiContext, live: LiveFigures) -> AccessGuard:
    """The application: page, metrics, health and `/api/v1`."""
    api = DocumentedApi(
        docs_url=None,
        redoc_url=None,
        # The names of the functions of a client that is generated from the document.
        generate_unique_id_function=attrgetter("name"),
        title="goodput-agent",
        version=context.version,
        description="Goodput, latency and events of the watched LLM inference servers.",
    )
    api.include_router(
        operation_routes(
            context.metrics,
            problems=context.problems,
            parts=context.parts,
        )
    )
    api.include_router(probe_routes(context))
    add_page(api, simulated=context.simulated)
    api.include_router(document_routes(context.documents))
    checked = [Depends(refuse_unknown)]
    for router in _routers(context, live):
        api.include_router(router, prefix="/api/v1", responses=dict(REFUSALS), dependencies=checked)
    add_problems(api)
    api.add_middleware(QueryGate, within_s=context.query_limit_s + _GRACE_S)
    api.add_middleware(GZipMiddleware, minimum_size=_LARGE_BYTES, compresslevel=_GZIP_LEVEL)
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
        request_routes(context),
        scatter_routes(context),
        contrast_routes(context),
        beside_routes(context),
        conversation_routes(context),
        event_routes(context),
        start_routes(context),
        alert_routes(context),
        engine_routes(context),
        gpu_routes(context),
        agent_routes(context),
        name_routes(context),
        timeline_routes(context),
        load_routes(context),
        pool_routes(context),
    )
