"""API routes of the runbooks that alerts link to."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, HTTPException
from fastapi.responses import PlainTextResponse

from agent.outputs.api.responses import ProblemResponse

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
