"""Routes that operate the agent: its pages, its exposition, and whether it lives and is ready."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from starlette.staticfiles import StaticFiles

from agent.outputs.api.base_responses import BaseResponse, ProblemResponse
from agent.outputs.web import ASSETS_PATH, PAGE_POLICY, content_policy, first_page


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


def _shown(page: str) -> Callable[[], Awaitable[HTMLResponse]]:
    policy = {"Content-Security-Policy": content_policy(page)}

    async def show() -> HTMLResponse:
        return HTMLResponse(page, headers=policy)

    return show


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
    pages: Mapping[str, str],
    metrics: Callable[[str], tuple[bytes, str]],
    *,
    problems: Callable[[], Sequence[str]],
    parts: Callable[[], Mapping[str, str]],
) -> APIRouter:
    """The routes of the pages by path, the exposition, and the agent's health.

    `problems` and `parts` never wait: they are called in the event loop.
    """
    router = APIRouter(tags=["operations"])
    for path, page in pages.items():
        router.add_api_route(path, _shown(page), include_in_schema=False)

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
    """Serve the page."""
    page = first_page(simulated=simulated)

    async def show() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": PAGE_POLICY})

    api.add_api_route("/", show, include_in_schema=False)
    api.mount(ASSETS, StaticFiles(directory=ASSETS_PATH))


# With `model`, FastAPI would document it as plain text, which only the pages are.
_PROBLEM = {"$ref": f"#/components/schemas/{ProblemResponse.__name__}"}
_NOT_FOUND: dict[str, Any] = {
    "description": "there is no such runbook",
    "content": {"application/json": {"schema": _PROBLEM}},
}


def runbook_routes(pages: Mapping[str, str]) -> APIRouter:
    """Routes that serve `pages` by file name, and nothing else."""
    router = APIRouter(tags=["operations"])

    @router.get(
        "/runbooks/{name:path}",
        response_class=PlainTextResponse,
        responses={404: _NOT_FOUND},
    )
    async def runbook(name: str) -> PlainTextResponse:
        """The page on an alert, as Markdown; README.md lists them all."""
        page = pages.get(name) or pages.get(f"{name}.md")
        if page is None:
            raise HTTPException(404, f"there is no runbook {name!r}; see /runbooks/README.md")
        return PlainTextResponse(page)

    return router
