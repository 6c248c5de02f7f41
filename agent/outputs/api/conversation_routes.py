"""API routes of conversations: figures by turn, the sessions of a window, and one session."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from math import ceil, floor
from typing import Annotated, Literal

from fastapi import APIRouter, HTTPException, Query
from pydantic import AfterValidator, Field

from agent.analysis.conversations import (
    MOST_TURNS,
    Conversation,
    Turn,
    conversations_of,
    figures_by_turn,
    session_verdict,
    worst_first,
)
from agent.analysis.cost.bill import spending
from agent.catalog.definitions import Verdict
from agent.outputs.api.api_context import ApiContext, ApiQueries
from agent.outputs.api.base_responses import BaseResponse
from agent.outputs.api.figure_routes import Chosen, LastHour
from agent.outputs.api.problems import ProblemResponse
from agent.outputs.api.query_parameters import AskedWindow, Limit, asked_window, without_nul
from agent.records.objective import Objective, objectives_by_agent
from agent.records.queries import Selection, Window

# Turns are numbered from those on that began so long before the window.
LOOKED_BACK_S = 3600.0
Order = Literal["newest", "worst"]


class TurnFiguresResponse(BaseResponse):
    """The turns of one bucket that began in the window."""

    bucket: str = Field(description="1, 2-3, 4-7, 8-15 or 16+")
    turns: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    cached_ratio: float | None = Field(description="of the prompts' tokens, those from a cache")
    gap_p50_s: float | None = Field(description="from the end of the turn before: tools and users")
    gap_p95_s: float | None
    evicted_tokens: int | None = Field(
        description="tokens of the prompt before that were computed again on the same engine; "
        "null if no turn has a prompt before it and a known cache"
    )
    moved_tokens: int | None = Field(description="the same after a change of the engine")
    refilled_usd: float | None = Field(
        description="both, at the price of computed input tokens in this window; null without one"
    )


class SessionVerdictsResponse(BaseResponse):
    """How many sessions met an objective's limits on sessions."""

    objective: str
    met: int
    missed: int
    undetermined: int
    attainment: float | None = Field(description="met / (met + missed)")


class SessionResponse(BaseResponse):
    """One session. Its figures are of all its turns that were read."""

    session: str
    turns: int
    began_at: datetime
    ended_at: datetime
    engines: list[str]
    missed_turns: int | None = Field(
        description="turns whose request missed an objective; null if none was judged"
    )
    first_ttft_s: float | None
    later_ttft_p50_s: float | None = Field(description="of the turns after the first")
    worst_ttft_s: float | None
    cached_ratio: float | None = Field(description="of the prompts' tokens, those from a cache")
    gap_p50_s: float | None = Field(description="between its turns: tools and users")
    refilled_tokens: int | None
    refilled_usd: float | None
    cost_usd: float | None = Field(description="of its turns that are priced")
    verdicts: dict[str, Verdict] = Field(description="by objective with limits on sessions")


class ConversationsResponse(BaseResponse):
    """The sessions with a turn that began in the window."""

    window_from: datetime
    window_until: datetime
    sessions: int
    turns: int
    complete: bool = Field(description=f"false if only the last {MOST_TURNS} turns were read")
    by_turn: list[TurnFiguresResponse]
    by_objective: list[SessionVerdictsResponse]
    items: list[SessionResponse] = Field(description="in the order of `sort`")
    left_out: int = Field(description="sessions beyond the limit")


class TurnResponse(BaseResponse):
    """One turn of a session."""

    number: int
    request_id: str | None
    trace_id: str
    span_id: str
    engine: str | None
    started_at: datetime
    ended_at: datetime
    gap_s: float | None
    ttft_s: float | None
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    refilled_tokens: int | None
    refilled_usd: float | None
    moved: bool = Field(description="whether the turn before ran on another engine")
    cost_usd: float | None


class ConversationResponse(BaseResponse):
    """One session turn by turn."""

    session: SessionResponse
    complete: bool
    turns: list[TurnResponse]


Session = Annotated[str, Query(min_length=1, max_length=256), AfterValidator(without_nul)]


def conversation_routes(context: ApiContext) -> APIRouter:
    """The routes of sessions."""
    router = APIRouter(tags=["requests"])

    @router.get("/conversations")
    def conversations(
        chosen: Chosen,
        asked: LastHour,
        limit: Limit = 100,
        sort: Order = "newest",
    ) -> ConversationsResponse:
        """Figures by turn, verdicts of sessions, and the sessions with a turn in the window.

        Turns are numbered from the first one that began up to an hour before the window. The worst
        session has the most missed turns, of equals the most tokens that were computed again.
        """
        bounds = asked.bounds(context.now(), context.longest_row_window_s)
        return context.read(lambda queries: _conversations(queries, chosen, bounds, limit, sort))

    @router.get("/conversation", responses={404: {"model": ProblemResponse}})
    def conversation(
        session: Session, chosen: Chosen, asked: Annotated[AskedWindow, asked_window("1d")]
    ) -> ConversationResponse:
        """The turns of one session that began in the window."""
        bounds = asked.bounds(context.now(), context.longest_row_window_s)
        return context.read(lambda queries: _conversation(queries, chosen, bounds, session))

    return router


def _conversations(
    queries: ApiQueries, chosen: Selection, bounds: tuple[float, float], limit: int, sort: Order
) -> ConversationsResponse:
    begin, end = bounds
    rows = queries.session_turns(chosen, begin - LOOKED_BACK_S, end)
    all_of = conversations_of(rows)
    found = [each for each in all_of if each.turns[-1].request.started_at >= begin]
    inside = [turn for each in found for turn in each.turns if turn.request.started_at >= begin]
    usd, judging = _usd_per_token(queries, chosen, begin, end), _judging(queries)
    in_order = worst_first(found) if sort == "worst" else found
    return ConversationsResponse(
        window_from=_utc(begin),
        window_until=_utc(end),
        sessions=len(found),
        turns=len(inside),
        complete=len(rows) < MOST_TURNS,
        by_turn=[
            TurnFiguresResponse(
                **asdict(each), refilled_usd=_times(usd, each.evicted_tokens, each.moved_tokens)
            )
            for each in figures_by_turn(inside)
        ],
        by_objective=_verdicts(found, judging),
        items=[_session(each, judging, usd) for each in in_order[:limit]],
        left_out=len(found[limit:]),
    )


def _conversation(
    queries: ApiQueries, chosen: Selection, bounds: tuple[float, float], session: str
) -> ConversationResponse:
    begin, end = bounds
    rows = queries.session_turns(chosen, begin, end, session)
    if not rows:
        raise HTTPException(404, f"no turn of session {session!r} began in this window")
    (one,) = conversations_of(rows)
    usd = _usd_per_token(queries, chosen, begin, end)
    return ConversationResponse(
        session=_session(one, _judging(queries), usd),
        complete=len(rows) < MOST_TURNS,
        turns=[_turn(each, usd) for each in one.turns],
    )


def _judging(queries: ApiQueries) -> Sequence[Objective]:
    """The objectives in force with limits on sessions; of equal names the first."""
    found: dict[str, Objective] = {}
    for _, objective in objectives_by_agent(queries.objectives_in_force()):
        if objective.session is not None:
            found.setdefault(objective.name, objective)
    return list(found.values())


def _verdicts_of(one: Conversation, judging: Sequence[Objective]) -> dict[str, Verdict]:
    """The verdict by the name of each objective that covers the first turn."""
    first = one.turns[0].request
    return {
        objective.name: session_verdict(one.turns, objective.session)
        for objective in judging
        if objective.session is not None
        and objective.match.covers(first.model, first.tenant, first.route, first.input_tokens)
    }


def _verdicts(
    found: Sequence[Conversation], judging: Sequence[Objective]
) -> list[SessionVerdictsResponse]:
    counts = {objective.name: Counter[Verdict]() for objective in judging}
    for one in found:
        for name, verdict in _verdicts_of(one, judging).items():
            counts[name][verdict] += 1
    return [
        SessionVerdictsResponse(
            objective=name,
            met=each[Verdict.MET],
            missed=each[Verdict.MISSED],
            undetermined=each[Verdict.UNDETERMINED],
            attainment=each[Verdict.MET] / judged
            if (judged := each[Verdict.MET] + each[Verdict.MISSED])
            else None,
        )
        for name, each in counts.items()
    ]


def _session(one: Conversation, judging: Sequence[Objective], usd: float | None) -> SessionResponse:
    requests = [each.request for each in one.turns]
    return SessionResponse(
        session=one.session,
        turns=len(requests),
        began_at=_utc(requests[0].started_at),
        ended_at=_utc(max(each.ended_at for each in requests)),
        engines=sorted({each.engine for each in requests if each.engine is not None}),
        missed_turns=one.missed_turns,
        first_ttft_s=requests[0].ttft_s,
        later_ttft_p50_s=one.later_ttft_p50_s,
        worst_ttft_s=one.worst_ttft_s,
        cached_ratio=one.cached_ratio,
        gap_p50_s=one.gap_p50_s,
        refilled_tokens=one.refilled_tokens,
        refilled_usd=_times(usd, one.refilled_tokens),
        cost_usd=one.cost_usd,
        verdicts=_verdicts_of(one, judging),
    )


def _turn(turn: Turn, usd: float | None) -> TurnResponse:
    request = turn.request._asdict()
    fields = {name: request[name] for name in TurnResponse.model_fields.keys() & request.keys()}
    times = {name: _utc(request[name]) for name in ("started_at", "ended_at")}
    return TurnResponse(
        **{**fields, **times},
        number=turn.number,
        gap_s=turn.gap_s,
        refilled_tokens=turn.refilled_tokens,
        refilled_usd=_times(usd, turn.refilled_tokens),
        moved=turn.moved,
    )


def _usd_per_token(
    queries: ApiQueries, chosen: Selection, begin: float, end: float
) -> float | None:
    """Dollars per computed input token of the engines of a window, whole minutes of it."""
    over = Window(from_s=floor(begin), until=ceil(end))
    ratios = spending(queries.minutes(over, chosen)).ratios
    per_million = None if ratios is None else ratios.per_million_computed_input
    return None if per_million is None else per_million / 1e6


def _times(usd: float | None, *tokens: int | None) -> float | None:
    known = [each for each in tokens if each is not None]
    return usd * sum(known) if usd is not None and known else None


def _utc(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)
