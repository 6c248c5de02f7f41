"""Routes that operate the agent: its page, its exposition, and whether it lives and is ready."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from agent.outputs.api import responses
from agent.outputs.web import content_policy

_LOG = logging.getLogger(__name__)

# FastAPI cannot know the content types of a response that is not JSON.
_PAGE: dict[int | str, dict[str, Any]] = {
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

    `problems` and `parts` wait for nothing: they are called in the event loop.
    """
    router = APIRouter(tags=["operations"])
    for path, page in pages.items():
        router.add_api_route(path, _shown(page), include_in_schema=False)

    scraped = _MetricsPage(metrics)

    @router.get("/metrics", response_class=Response, responses=_PAGE)
    async def exposition(request: Request) -> Response:
        """The exposition: Prometheus text, or OpenMetrics with exemplars if accepted."""
        return await scraped.response(request.headers.get("accept", ""))

    @router.get("/healthz")
    async def healthz() -> responses.HealthResponse:
        """Answers while the process lives, even if every thread waits for the database."""
        return responses.HealthResponse(status="ok", problems=[])

    @router.get("/readyz", responses={503: {"model": responses.ReadinessResponse}})
    async def readyz(response: Response) -> responses.ReadinessResponse:
        """Whether spans can be received and stored: what the last writes did, and each part."""
        found = list(problems())
        response.status_code = 503 if found else 200
        status: Literal["ok", "not ready"] = "not ready" if found else "ok"
        in_words = {**parts(), **scraped.problems}
        return responses.ReadinessResponse(status=status, problems=found, parts=in_words)

    return router
