"""API routes of lists: events, engines, GPUs and agents."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from fastapi import APIRouter, HTTPException
from pydantic import Field

from agent.outputs.api.api_context import ApiContext, ApiQueries
from agent.outputs.api.base_responses import BaseResponse, Confidence, ListOf, ProblemResponse
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
from agent.records.queries import PageOf


class EventResponse(BaseResponse):
    """An event of an engine or a GPU."""

    at: datetime
    agent: str
    engine: str | None
    gpu: str | None
    kind: str
    confidence: Confidence
    evidence: Mapping[str, Any]


class EngineResponse(BaseResponse):
    """An engine that an agent watches; `up` is false if the last scrape failed."""

    name: str
    agent: str
    up: bool | None = Field(description="null if that is not known")
    problem: str | None = Field(default=None, description="why it is not known")
    model: str | None
    dialect: str | None
    read_at: datetime | None
    running: float | None = Field(default=None, description="requests in the engine's batch")
    waiting: float | None = Field(default=None, description="requests in its queue")
    kv_cache_usage: float | None = Field(default=None, description="share of the KV cache in use")
    ejected: str | None = Field(
        default=None,
        description="why the proxy sends it no new requests, such as `error 500`; null if it does",
    )


class ProcessResponse(BaseResponse):
    """A process on a GPU, by its process id on the host."""

    pid: int
    memory_bytes: int | None = Field(description="null if the driver withholds it")


class MigInstanceResponse(BaseResponse):
    """A MIG instance of a GPU; its `facts` have the same names as those of GPUs."""

    uuid: str
    name: str
    gpu_instance: int | None
    compute_instance: int | None
    gpu_slices: int | None
    facts: Mapping[str, float | None]
    processes: list[ProcessResponse] | None


class GpuResponse(BaseResponse):
    """One sample of a GPU."""

    gpu: str = Field(description="the UUID; the index may change")
    index: int
    name: str
    at: datetime
    agent: str
    problem: str | None = Field(description="why the GPU could not be read")
    facts: Mapping[str, float | None] = Field(
        description="by name, with labels in braces; unknown facts are absent"
    )
    processes: list[ProcessResponse] | None = Field(description="null if they could not be read")
    mig_instances: list[MigInstanceResponse]


Row = Mapping[str, Any]


def gpu_routes(context: ApiContext) -> APIRouter:
    """The routes of GPUs, which read the store: it holds the samples of every agent."""
    router = APIRouter(tags=["gpus"])
    now = context.now

    @router.get("/gpus")
    def gpus(agent: Name = None) -> ListOf[GpuResponse]:
        """The newest sample of each GPU, of one agent or of all; `at` is the time of the sample."""
        found = context.read(lambda queries: queries.newest_gpu_samples(now()))
        return ListOf[GpuResponse](
            items=[gpu_response(row) for row in found if agent in (None, "", row["agent"])]
        )

    @router.get("/gpus/{gpu:path}", responses={404: {"model": ProblemResponse}})
    def gpu(
        gpu: PathName, window: WindowText = "1h", limit: Limit = 100, cursor: CursorText = None
    ) -> ListOf[GpuResponse]:
        """The samples of one GPU in the window, the newest first."""
        since = now() - window_s(window, context.longest_window_s)
        after = cursor_of(cursor)

        def samples(queries: ApiQueries) -> PageOf[Row]:
            page = queries.gpu_samples(gpu, since, after, limit)
            if not page.items and not queries.knows_gpu(gpu):
                raise HTTPException(404, f"no sample of GPU {gpu!r} is stored; see /api/v1/gpus")
            return page

        page = context.read(samples)
        return ListOf[GpuResponse](
            items=[gpu_response(row) for row in page.items], next=cursor_text(page.next)
        )

    return router


def gpu_response(row: Row) -> GpuResponse:
    """The response of a stored sample."""
    return GpuResponse(**row, index=row["gpu_index"])


class AgentResponse(BaseResponse):
    """An agent that runs, or that ran lately; null is what it has not reported."""

    name: str
    version: str | None
    simulated: bool | None = Field(description="whether its engines are simulated")
    started_at: datetime | None = Field(description="by the agent's clock")
    last_seen_at: datetime | None = Field(description="its last heartbeat, by the database's clock")
    silent_s: float | None = Field(description="seconds since then, by the database's clock")
    stopped_at: datetime | None = Field(description="when it stopped in order; null while it runs")
    overdue: bool | None = Field(
        description="whether it has shown no heartbeat for 30 s, and did not stop in order"
    )
    waiting_rows: int | None = Field(
        description="rows of its file that this database does not have yet; null without "
        "storage.publish_to"
    )
    lag_s: float | None = Field(
        description="seconds since it had everything, as of the last heartbeat; null without "
        "storage.publish_to"
    )


def agent_routes(context: ApiContext) -> APIRouter:
    """The route of agents."""
    router = APIRouter(tags=["lists"])

    @router.get("/agents")
    def agents() -> ListOf[AgentResponse]:
        """The agents that write to this database, by name; those that stopped for some days."""
        return ListOf[AgentResponse](items=context.read(agent_responses))

    return router


def agent_responses(queries: ApiQueries) -> list[AgentResponse]:
    """Every agent by name."""
    return [AgentResponse(**row, last_seen_at=row["seen_at"]) for row in queries.agents()]


def event_routes(context: ApiContext) -> APIRouter:
    """The route of events."""
    router = APIRouter(tags=["lists"])

    @router.get("/events")
    def events(
        *,
        agent: Name = None,
        engine: Name = None,
        gpu: Name = None,
        kind: Name = None,
        confidence: Confidence | None = None,
        window: WindowText | None = None,
        limit: Limit = 100,
        cursor: CursorText = None,
    ) -> ListOf[EventResponse]:
        """Events of the window, or of all time without one, the newest first."""
        longest_s = context.longest_window_s
        since = context.now() - window_s(window, longest_s) if window else None
        after = cursor_of(cursor)
        page = context.read(
            lambda queries: queries.events(
                after,
                limit,
                since=since,
                agent=agent or None,
                engine=engine or None,
                gpu=gpu or None,
                kind=kind or None,
                confidence=confidence,
            )
        )
        return ListOf[EventResponse](
            items=[EventResponse(**row) for row in page.items],
            next=cursor_text(page.next),
        )

    return router


def engine_routes(context: ApiContext) -> APIRouter:
    """The route of engines."""
    router = APIRouter(tags=["lists"])

    @router.get("/engines")
    def engines(agent: Name = None) -> ListOf[EngineResponse]:
        """The engines of this agent; of `serve` those of every agent."""
        return ListOf[EngineResponse](
            items=[
                EngineResponse(**row)
                for row in context.engines()
                if agent in (None, "", row["agent"])
            ]
        )

    return router
