"""The API route `/lengths`: verdicts by input and output length."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Protocol

from fastapi import APIRouter, Depends
from pydantic import Field

from agent.analysis.input_lengths import INPUT_LENGTHS, OUTPUT_LENGTHS
from agent.outputs.api.base_response import BaseResponse
from agent.outputs.api.query_parameters import WindowText, selection, window_before, window_s
from agent.records.queries import (
    LengthVerdicts,
    Selection,
    Window,
)


class LengthVerdictsResponse(BaseResponse):
    """The verdicts on requests of these lengths."""

    input_length: str
    output_length: str
    met: int
    missed: int
    attainment: float | None = Field(description="met / (met + missed)")


class LengthsResponse(BaseResponse):
    """Verdicts by input and output length, of the rows that are kept; no group is empty.

    Lengths are in tokens, 1k is 1024, and a group includes its lower edge. Requests of unknown
    length are left out.
    """

    window_from: datetime
    window_until: datetime
    window_s: float
    input_lengths: list[str] = Field(description="all of them, the shortest first")
    output_lengths: list[str]
    items: list[LengthVerdictsResponse]


class LengthQueries(Protocol):
    """The store's queries of requests by length."""

    def verdicts_by_length(self, window: Window, selection: Selection) -> Sequence[LengthVerdicts]:
        """Verdicts by input and output length."""


def length_routes(queries: LengthQueries, now: Callable[[], float], longest_s: float) -> APIRouter:
    """The route, in windows of up to `longest_s`."""
    router = APIRouter(tags=["figures"])

    @router.get("/lengths")
    def lengths(
        chosen: Annotated[Selection, Depends(selection)], window: WindowText = "1h"
    ) -> LengthsResponse:
        """How many requests met and missed, by input and output length."""
        length_s = window_s(window, longest_s)
        over = window_before(now(), length_s, 1)
        return LengthsResponse(
            window_from=datetime.fromtimestamp(over.from_s, UTC),
            window_until=datetime.fromtimestamp(over.until, UTC),
            window_s=over.length_s,
            input_lengths=list(INPUT_LENGTHS),
            output_lengths=list(OUTPUT_LENGTHS),
            items=[_of_lengths(each) for each in queries.verdicts_by_length(over, chosen)],
        )

    return router


def _of_lengths(verdicts: LengthVerdicts) -> LengthVerdictsResponse:
    judged = verdicts.met + verdicts.missed
    attainment = verdicts.met / judged if judged else None
    return LengthVerdictsResponse(**asdict(verdicts), attainment=attainment)
