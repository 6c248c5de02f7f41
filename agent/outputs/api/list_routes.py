"""API routes of lists: events, engines, GPUs and agents."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from operator import itemgetter
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException
from pydantic import Field

from agent.catalog.engine_states import ENGINE_STATES
from agent.outputs.api.api_context import ApiContext, ApiQueries
from agent.outputs.api.base_responses import BaseResponse, Confidence, ListOf
from agent.outputs.api.problems import ProblemResponse
from agent.outputs.api.query_parameters import (
    AskedWindow,
    CursorText,
    Limit,
    Name,
    PathName,
    asked_window,
    cursor_of,
    cursor_text,
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
    problem: str | None = Field(
        default=None, description="why it is down, as a sentence, or why that is not known"
    )
    model: str | None
    dialect: str | None
    role: str | None = Field(default=None, description="prefill, decode or both, by the settings")
    read_at: datetime | None
    running: float | None = Field(default=None, description="requests in the engine's batch")
    waiting: float | None = Field(default=None, description="requests in its queue")
    kv_cache_usage: float | None = Field(default=None, description="share of the KV cache in use")
    rank_skew: Mapping[str, float] | None = Field(
        default=None,
        description="highest of the data-parallel ranks over their mean in the last 5 minutes, by "
        "requests, running, waiting, kv_cache_usage and step_time; null with one rank",
    )
    ejected: str | None = Field(
        default=None,
        description="why the proxy sends it no new requests, such as `error 500`; null if it does",
    )
    state: str | None = Field(
        default=None,
        description="what its probes report, also a state that only a newer agent knows; null "
        "before the first poll",
    )
    state_detail: str | None = Field(default=None, description="what the state means")
    state_why: str | None = Field(
        default=None,
        description="the kind of the event, or the failed read of the metrics, behind the state",
    )
    state_since: datetime | None = None
    age_s: float | None = Field(default=None, description="seconds since `read_at`")
    stale_after_s: float | None = Field(
        default=None, description="above this `age_s` the figures are not those of now"
    )


class SetupActionResponse(BaseResponse):
    """Lines to paste; `where` says into what. Without lines, `where` is all there is to say."""

    where: str
    lines: Sequence[str]


class SetupStepResponse(BaseResponse):
    """A source of figures of an engine: whether it is there, what it shows, and what adds it."""

    name: str
    state: Literal["done", "missing"]
    shows: str
    actions: Sequence[SetupActionResponse] = Field(description="empty if it is there")


class SetupResponse(BaseResponse):
    """What an agent sees of an engine, and how it would see more, in the order of the steps."""

    engine: str
    agent: str
    dialect: str | None
    version: str | None
    model: str | None
    steps: Sequence[SetupStepResponse] = Field(
        description="without those that this engine cannot have"
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
    age_s: float | None = Field(default=None, description="seconds since `at`; null in a history")
    stale_after_s: float | None = Field(
        default=None,
        description="above this `age_s` the sample is not one of now; 0 if its agent has ended",
    )


Row = Mapping[str, Any]


def gpu_routes(context: ApiContext) -> APIRouter:
    """The routes of GPUs, which read the store: it holds the samples of every agent."""
    router = APIRouter(tags=["gpus"])
    now = context.now

    @router.get("/gpus")
    def gpus(agent: Name = None) -> ListOf[GpuResponse]:
        """The newest sample of each GPU, of one agent or of all; `at` is the time of the sample."""
        found = context.read(lambda queries: newest_gpus(context, queries))
        return ListOf[GpuResponse](
            items=[each for each in found if agent in (None, "", each.agent)]
        )

    @router.get("/gpus/{gpu:path}", responses={404: {"model": ProblemResponse}})
    def gpu(
        gpu: PathName,
        asked: Annotated[AskedWindow, asked_window("1h")],
        limit: Limit = 100,
        cursor: CursorText = None,
    ) -> ListOf[GpuResponse]:
        """The samples of one GPU in the window, the newest first."""
        since, until = asked.bounds(now(), context.longest_window_s)
        after = cursor_of(cursor)

        def samples(queries: ApiQueries) -> PageOf[Row]:
            page = queries.gpu_samples(gpu, since, until, after, limit)
            if not page.items and not queries.knows_gpu(gpu):
                raise HTTPException(404, f"no sample of GPU {gpu!r} is stored; see /api/v1/gpus")
            return page

        page = context.read(samples)
        return ListOf[GpuResponse](
            items=[gpu_response(row) for row in page.items], next=cursor_text(page.next)
        )

    return router


def gpu_response(row: Row) -> GpuResponse:
    """The response of a sample."""
    return GpuResponse(**row, index=row["gpu_index"])


# Agents store a sample of each GPU every minute.
_STORED_STALE_AFTER_S = 180.0


def newest_gpus(context: ApiContext, queries: ApiQueries) -> list[GpuResponse]:
    """The newest sample of each GPU: of this agent's last poll, and the stored ones of others."""
    now = context.now()
    polled = {row["gpu"]: row for row in context.gpus()}
    ended = {each["name"] for each in queries.agents() if each["stopped_at"] or each["overdue"]}
    stored = {
        row["gpu"]: {
            **row,
            "stale_after_s": 0.0 if row["agent"] in ended else _STORED_STALE_AFTER_S,
        }
        for row in queries.newest_gpu_samples(now)
    }
    newest = sorted((stored | polled).values(), key=itemgetter("agent", "gpu_index", "gpu"))
    return [gpu_response({**row, "age_s": _age_s(row["at"], now)}) for row in newest]


def engine_responses(context: ApiContext) -> list[EngineResponse]:
    """Every engine as it was last read."""
    now = context.now()
    return [
        EngineResponse(
            **row, age_s=_age_s(row["read_at"], now), state_detail=_meaning(row.get("state"))
        )
        for row in context.engines()
    ]


_MEANINGS = {str(state): each.meaning for state, each in ENGINE_STATES.items()}


def _meaning(state: str | None) -> str | None:
    return None if state is None else _MEANINGS.get(state, "only a newer version knows this state")


def _age_s(at: float | None, now: float) -> float | None:
    return None if at is None else max(now - at, 0.0)


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


class NamesResponse(BaseResponse):
    """Names by which requests can be chosen, sorted."""

    agent: list[str]
    engine: list[str]
    model: list[str]
    tenant: list[str]
    objective: list[str] = Field(description="those in force")


def name_routes(context: ApiContext) -> APIRouter:
    """The route of names by which requests can be chosen."""
    router = APIRouter(tags=["lists"])

    @router.get("/names")
    def names() -> NamesResponse:
        """The names of stored requests, of the watched engines and of agents; the objectives."""
        return context.read(lambda queries: _names(queries, context.engines()))

    return router


def _names(queries: ApiQueries, engines: Sequence[Row]) -> NamesResponse:
    known = {kind: set(names) for kind, names in queries.names().items()}
    known["agent"] |= {row["name"] for row in queries.agents()}
    known["engine"] |= {row["name"] for row in engines}
    known["model"] |= {row["model"] for row in engines if row["model"]}
    known["objective"] = {row["name"] for row in queries.objectives_in_force()}
    return NamesResponse(**{kind: sorted(names) for kind, names in known.items()})


def _event_bounds(asked: AskedWindow, context: ApiContext) -> tuple[float | None, float | None]:
    """Without a window of all time; up to now, those that a clock dated later belong to it."""
    if not asked.given:
        return None, None
    now = context.now()
    since, until = asked.bounds(now, context.longest_window_s)
    return since, until if until < now else None


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
        asked: Annotated[AskedWindow, asked_window("")],
        limit: Limit = 100,
        cursor: CursorText = None,
    ) -> ListOf[EventResponse]:
        """Events of the window, or of all time without one, the newest first."""
        since, until = _event_bounds(asked, context)
        after = cursor_of(cursor)
        page = context.read(
            lambda queries: queries.events(
                after,
                limit,
                since=since,
                until=until,
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
    def engines(
        agent: Name = None, engine: Name = None, model: Name = None
    ) -> ListOf[EngineResponse]:
        """The engines of this agent; of `serve` those of every agent."""
        return ListOf[EngineResponse](
            items=[
                each
                for each in engine_responses(context)
                if agent in (None, "", each.agent)
                and engine in (None, "", each.name)
                and model in (None, "", each.model)
            ]
        )

    @router.get("/setup")
    def setup(agent: Name = None, engine: Name = None) -> ListOf[SetupResponse]:
        """What this agent sees of each of its engines, and the lines that let it see more.

        Empty for `serve`, which watches no engine, and for simulated engines.
        """
        return ListOf[SetupResponse](
            items=[
                SetupResponse.model_validate(row, from_attributes=True)
                for row in context.setups()
                if agent in (None, "", row["agent"]) and engine in (None, "", row["engine"])
            ]
        )

    return router
