"""Probes of engines, for kubelets, routers and load balancers: alive by progress, and ready.

They need no token and read nothing: each returns the state of the engine at the agent's last poll.
"""

from datetime import UTC, datetime

from fastapi import APIRouter, HTTPException, Response
from pydantic import Field

from agent.catalog.engine_states import ENGINE_STATES, ProbedState
from agent.outputs.api.api_context import ApiContext
from agent.outputs.api.base_responses import BaseResponse
from agent.outputs.api.problems import ProblemResponse
from agent.outputs.api.query_parameters import PathName
from agent.records.engine import EngineStatus

_NOT_SO = 503


class ProbeResponse(BaseResponse):
    """The state of an engine at the agent's last poll."""

    engine: str
    reason: ProbedState
    detail: str = Field(description="what the reason means")
    why: str | None = Field(
        description="the kind of the event, or the failed read of the metrics, behind the reason"
    )
    since: datetime
    read_at: datetime = Field(description="the time of the poll")


def probe_routes(context: ApiContext) -> APIRouter:
    """The two probes of each engine."""
    router = APIRouter(
        prefix="/engines",
        tags=["operations"],
        responses={
            _NOT_SO: {"model": ProbeResponse, "description": "it is not"},
            404: {"model": ProblemResponse, "description": "this agent watches no such engine"},
        },
    )

    @router.get("/{engine:path}/livez")
    async def engine_livez(engine: PathName, response: Response) -> ProbeResponse:
        """Whether the engine is alive: it computes, has no work, loads or is paused."""
        status = _status(context, engine)
        response.status_code = 200 if ENGINE_STATES[status.state].alive else _NOT_SO
        return _response(engine, status)

    @router.get("/{engine:path}/readyz")
    async def engine_readyz(engine: PathName, response: Response) -> ProbeResponse:
        """Whether the engine takes new requests."""
        status = _status(context, engine)
        response.status_code = 200 if ENGINE_STATES[status.state].ready else _NOT_SO
        return _response(engine, status)

    return router


def _status(context: ApiContext, engine: str) -> EngineStatus:
    status = context.states().get(engine)
    if status is None:
        raise HTTPException(404, f"this agent watches no engine {engine!r}; see /api/v1/engines")
    return status


def _response(engine: str, status: EngineStatus) -> ProbeResponse:
    return ProbeResponse(
        engine=engine,
        reason=status.state,
        detail=ENGINE_STATES[status.state].meaning,
        why=status.why,
        since=datetime.fromtimestamp(status.since, UTC),
        read_at=datetime.fromtimestamp(status.read_at, UTC),
    )
