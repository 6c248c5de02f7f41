"""API routes of the scatter: requests as dots, and what a box of dots has more of."""

from dataclasses import asdict, replace
from datetime import UTC, datetime
from operator import itemgetter
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from pydantic import Field

from agent.analysis.contrast import contrasts
from agent.outputs.api.api_context import ApiContext
from agent.outputs.api.base_responses import BaseResponse, Verdict
from agent.outputs.api.problems import refuse
from agent.outputs.api.query_parameters import (
    AskedWindow,
    asked_window,
    request_filter,
    unix_s,
)
from agent.records.queries import Box, Dots, Latency, RequestFilter


class DotsOfVerdict(BaseResponse):
    """Dots of one verdict: two lists of the same length."""

    at: list[float] = Field(description="when each request began, in Unix seconds")
    seconds: list[float]


class ScatterResponse(BaseResponse):
    """Requests that began in the window, as dots; those without the latency are left out."""

    window_from: datetime
    window_until: datetime
    every: int = Field(description="1 for all requests; 10 for a sample of one in ten")
    dots: int
    by_verdict: dict[Verdict, DotsOfVerdict]


class ContrastItem(BaseResponse):
    """A name that requests in the box have more often, by more than chance."""

    dimension: str = Field(description="cause, tenant, model, engine, input_length or session")
    name: str
    inside: int = Field(description="requests in the box with this name")
    outside: int
    inside_share: float
    outside_share: float


class ContrastResponse(BaseResponse):
    """What the requests in a box have more of than the rest of the window; counts are of all."""

    inside: int = Field(description="requests in the box")
    outside: int
    items: list[ContrastItem] = Field(description="the largest difference of shares first")


By = Annotated[Latency, Query(description="the latency of the scatter")]
Seconds = Annotated[float, Query(ge=0, allow_inf_nan=False)]
_VERDICTS: tuple[Verdict, ...] = ("met", "missed", "undetermined")
# A dot is no sharper on a screen, and the response half as long.
_DIGITS_OF_TIME, _DIGITS_OF_LATENCY = 2, 5


def scatter_routes(context: ApiContext) -> APIRouter:
    """The route of dots."""
    router = APIRouter(tags=["requests"])

    @router.get("/scatter")
    def scatter(
        wanted: Annotated[RequestFilter, Depends(request_filter)],
        asked: Annotated[AskedWindow, asked_window("1h")],
        by: By = "ttft",
    ) -> ScatterResponse:
        """When requests began and how long they took: at most 20,000, evenly taken of more."""
        begin, end = asked.bounds(context.now(), context.longest_row_window_s)
        begun = replace(wanted, started_from=begin, started_until=end)
        found = context.read(lambda queries: queries.dots(begun, by))
        return ScatterResponse(
            window_from=datetime.fromtimestamp(begin, UTC),
            window_until=datetime.fromtimestamp(end, UTC),
            every=found.every,
            dots=len(found.rows),
            by_verdict=_by_verdict(found),
        )

    return router


def _by_verdict(found: Dots) -> dict[Verdict, DotsOfVerdict]:
    lists = {name: DotsOfVerdict(at=[], seconds=[]) for name in _VERDICTS}
    by_text = {str(name): lists[name] for name in _VERDICTS}
    # Each database has an order of its own.
    for at, value, verdict in sorted(found.rows, key=itemgetter(0, 1)):
        if verdict in by_text:
            by_text[verdict].at.append(round(at, _DIGITS_OF_TIME))
            by_text[verdict].seconds.append(round(value, _DIGITS_OF_LATENCY))
    return lists


def contrast_routes(context: ApiContext) -> APIRouter:
    """The route that compares a box of dots with the rest."""
    router = APIRouter(tags=["requests"])

    @router.get("/contrast")
    def contrast(
        *,
        wanted: Annotated[RequestFilter, Depends(request_filter)],
        asked: Annotated[AskedWindow, asked_window("1h")],
        by: By = "ttft",
        box_from: datetime,
        box_until: datetime,
        box_min_s: Seconds = 0.0,
        box_max_s: Seconds = 1e9,
    ) -> ContrastResponse:
        """What the requests in a box of the scatter have more of than the others of the window."""
        begin, end = asked.bounds(context.now(), context.longest_row_window_s)
        begun = replace(wanted, started_from=begin, started_until=end)
        box = Box(by, unix_s(box_from), unix_s(box_until), box_min_s, box_max_s)
        if box.until_s < box.from_s or box.max_s < box.min_s:
            raise refuse("box_until: the box ends before it begins")
        counts = context.read(lambda queries: queries.box_counts(begun, box))
        found = contrasts(counts)
        return ContrastResponse(
            inside=counts.inside,
            outside=counts.outside,
            items=[ContrastItem(**asdict(each)) for each in found],
        )

    return router
