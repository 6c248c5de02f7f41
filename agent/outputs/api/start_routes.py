"""The route of engines' starts: the phases of each, and how it differs from the one before."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from agent.catalog.start_phases import START_PHASES
from agent.outputs.api.api_context import ApiContext
from agent.outputs.api.base_responses import BaseResponse, ListOf
from agent.outputs.api.query_parameters import AskedWindow, Limit, Name, asked_window
from agent.records.event import EventKind


class StartResponse(BaseResponse):
    """A start of an engine that an agent saw. Durations in seconds; null is unknown."""

    ready_at: datetime = Field(description="the first scrape that the engine answered")
    agent: str
    engine: str
    began_at: datetime | None = Field(description="when its process began")
    start_s: float | None = Field(description="from then to `ready_at`")
    first_request_s: float | None = Field(
        description="from then to the first token of its first request; null if there was none "
        "within five minutes of `ready_at`"
    )
    phases: Mapping[str, float] = Field(
        description="the parts of `start_s` in their order; empty without the engine's spans"
    )
    change_s: float | None = Field(
        description="`start_s` less that of the engine's start before, in this window"
    )
    phase_changes: Mapping[str, float] = Field(
        description="the same of each phase; empty if either start has none"
    )


def start_routes(context: ApiContext) -> APIRouter:
    """The route of starts."""
    router = APIRouter(tags=["lists"])

    @router.get("/starts")
    def starts(
        *,
        agent: Name = None,
        engine: Name = None,
        asked: Annotated[AskedWindow, asked_window("30d")],
        limit: Limit = 100,
    ) -> ListOf[StartResponse]:
        """The starts of engines in the window, the newest first, each beside the one before."""
        since, until = asked.bounds(context.now(), context.longest_window_s)
        page = context.read(
            lambda queries: queries.events(
                None,
                limit,
                since=since,
                until=until,
                agent=agent or None,
                engine=engine or None,
                gpu=None,
                kind=EventKind.STARTED,
                confidence=None,
            )
        )
        return ListOf[StartResponse](items=_compared([_start(row) for row in page.items]))

    return router


def _start(row: Mapping[str, Any]) -> StartResponse:
    evidence = row["evidence"]
    seconds = {phase: evidence.get(f"{phase}_s") for phase in START_PHASES}
    return StartResponse(
        ready_at=row["at"],
        agent=row["agent"],
        engine=row["engine"],
        began_at=evidence.get("began_at"),
        start_s=evidence.get("start_s"),
        first_request_s=evidence.get("first_request_s"),
        phases={phase: each for phase, each in seconds.items() if each is not None},
        change_s=None,
        phase_changes={},
    )


def _compared(newest_first: Sequence[StartResponse]) -> list[StartResponse]:
    """The starts with their changes against the one before of the same engine."""
    before: dict[tuple[str, str], StartResponse] = {}
    compared: list[StartResponse] = []
    for start in reversed(newest_first):
        last = before.get((start.agent, start.engine))
        before[start.agent, start.engine] = start
        compared.append(start if last is None else start.model_copy(update=_changes(last, start)))
    return compared[::-1]


def _changes(before: StartResponse, after: StartResponse) -> dict[str, Any]:
    known = before.start_s is not None and after.start_s is not None
    both = {**before.phases, **after.phases} if before.phases and after.phases else {}
    return {
        "change_s": (after.start_s or 0.0) - (before.start_s or 0.0) if known else None,
        "phase_changes": {
            phase: after.phases.get(phase, 0.0) - before.phases.get(phase, 0.0)
            for phase in START_PHASES
            if phase in both
        },
    }
