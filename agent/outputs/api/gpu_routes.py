"""The routes of GPUs: the newest sample of each, and the samples of one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from fastapi import APIRouter, HTTPException

from agent.outputs.api import responses
from agent.outputs.api.query_parameters import (
    CursorText,
    Limit,
    Name,
    PathName,
    WindowText,
    cursor_of,
    cursor_text,
    window_s,
)
from agent.records.queries import Cursor, PageOf

Row = Mapping[str, Any]


class GpuQueries(Protocol):
    """The store's queries about GPUs."""

    def newest_gpu_samples(self, now: float) -> Sequence[Row]:
        """The newest sample of each GPU at a Unix time."""

    def gpu_samples(self, gpu: str, since: float, after: Cursor | None, limit: int) -> PageOf[Row]:
        """The samples of a GPU since a Unix time, the newest first."""

    def knows_gpu(self, gpu: str) -> bool:
        """Whether any sample of this GPU is stored."""


def gpu_routes(queries: GpuQueries, now: Callable[[], float], longest_s: float) -> APIRouter:
    """The routes, which read the store: it holds the samples of every agent."""
    router = APIRouter(tags=["gpus"])

    @router.get("/gpus")
    def gpus(agent: Name = None) -> responses.ListOf[responses.GpuResponse]:
        """The newest sample of each GPU, of one agent or of all; `at` is the time of the sample."""
        return responses.ListOf[responses.GpuResponse](
            items=[
                gpu_response(row)
                for row in queries.newest_gpu_samples(now())
                if agent in (None, "", row["agent"])
            ]
        )

    @router.get("/gpus/{gpu:path}", responses={404: {"model": responses.ProblemResponse}})
    def gpu(
        gpu: PathName, window: WindowText = "1h", limit: Limit = 100, cursor: CursorText = None
    ) -> responses.ListOf[responses.GpuResponse]:
        """The samples of one GPU in the window, the newest first."""
        since = now() - window_s(window, longest_s)
        page = queries.gpu_samples(gpu, since, cursor_of(cursor), limit)
        if not page.items and not queries.knows_gpu(gpu):
            raise HTTPException(404, f"no sample of GPU {gpu!r} is stored; see /api/v1/gpus")
        return responses.ListOf[responses.GpuResponse](
            items=[gpu_response(row) for row in page.items], next=cursor_text(page.next)
        )

    return router


def gpu_response(row: Row) -> responses.GpuResponse:
    """The response of a stored sample."""
    return responses.GpuResponse(**row, index=row["gpu_index"])
