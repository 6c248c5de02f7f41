"""The API route of what an engine did in a time: its requests side by side, and its samples."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import AfterValidator, Field

from agent.analysis.engine_moments import engine_moments
from agent.analysis.latency import LATENCIES, request_parts
from agent.outputs.api.api_context import ApiContext, ApiQueries
from agent.outputs.api.base_responses import BaseResponse, Status, Verdict
from agent.outputs.api.problems import refuse
from agent.outputs.api.query_parameters import (
    AskedWindow,
    Limit,
    Name,
    asked_window,
    without_nul,
)
from agent.records.queries import DataSource


class LaneResponse(BaseResponse):
    """A request that ran in this time, by its phases in their order."""

    request_id: str | None
    trace_id: str
    span_id: str
    tenant: str | None
    status: Status
    verdict: Verdict
    cause: str | None
    started_at: datetime
    ended_at: datetime
    front_s: float | None
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    preemptions: int | None


class MomentResponse(BaseResponse):
    """A sample of the engine. Steps, tokens and preemptions are since the sample before."""

    at: datetime
    running: float | None
    waiting: float | None
    kv_cache_usage: float | None
    steps_per_s: float | None
    tokens_per_step: float | None
    preemptions: float | None


class BesideResponse(BaseResponse):
    """What an engine did in a time."""

    window_from: datetime
    window_until: datetime
    requests: int = Field(description="that ran in it and began up to an hour before")
    lanes: list[LaneResponse] = Field(
        description="of more than `limit`, those that ran the longest in it; the oldest first"
    )
    moments: list[MomentResponse]


Engine = Annotated[str, Query(max_length=256), AfterValidator(without_nul)]


def beside_routes(context: ApiContext) -> APIRouter:
    """The route of an engine's requests and samples."""
    router = APIRouter(tags=["requests"])

    @router.get("/beside")
    def beside(
        engine: Engine,
        asked: Annotated[AskedWindow, asked_window("5m")],
        agent: Name = None,
        limit: Limit = 100,
    ) -> BesideResponse:
        """The requests that ran on an engine side by side, and samples of the engine."""
        if not engine:
            raise refuse("engine: say of which")
        begin, end = asked.bounds(context.now(), context.longest_row_window_s)
        of = DataSource(agent=agent or None, engine=engine)

        def found(queries: ApiQueries) -> BesideResponse:
            rows = queries.requests_on(of, begin, end)
            longest = sorted(rows, key=lambda row: _ran_s(row, begin, end))[-limit:]
            samples = queries.samples_of(of, begin, end)
            return BesideResponse(
                window_from=datetime.fromtimestamp(begin, UTC),
                window_until=datetime.fromtimestamp(end, UTC),
                requests=len(rows),
                lanes=[_lane(row) for row in sorted(longest, key=lambda row: row["started_at"])],
                moments=[MomentResponse(**asdict(each)) for each in engine_moments(samples)],
            )

        return context.read(found)

    return router


def _ran_s(row: Mapping[str, Any], begin: float, end: float) -> float:
    ran_s: float = min(row["ended_at"], end) - max(row["started_at"], begin)
    return ran_s


def _lane(row: Mapping[str, Any]) -> LaneResponse:
    parts = request_parts(**{name: row[name] for name in LATENCIES})
    return LaneResponse(**row, front_s=parts.front_s)
