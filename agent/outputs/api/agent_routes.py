"""The API route `/agents`: which agents write to the database, and whether each still does."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from fastapi import APIRouter
from pydantic import Field

from agent.outputs.api.base_response import BaseResponse
from agent.outputs.api.responses import ListOf

Row = Mapping[str, Any]


class AgentResponse(BaseResponse):
    """An agent that runs, or that ran lately; null is what an earlier version does not report."""

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
        description="changes in its journal that this database does not have yet; null without a "
        "journal"
    )
    lag_s: float | None = Field(
        description="seconds since the oldest of them, as of the last heartbeat; null without a "
        "journal"
    )


class AgentQueries(Protocol):
    """The store's query of agents."""

    def agents(self) -> Sequence[Row]:
        """Every agent by name."""


def agent_routes(queries: AgentQueries) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["lists"])

    @router.get("/agents")
    def agents() -> ListOf[AgentResponse]:
        """The agents that write to this database, by name; those that stopped for some days."""
        return ListOf[AgentResponse](items=agent_responses(queries))

    return router


def agent_responses(queries: AgentQueries) -> list[AgentResponse]:
    """Every agent by name."""
    return [AgentResponse(**row, last_seen_at=row["seen_at"]) for row in queries.agents()]
