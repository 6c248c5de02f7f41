"""The figures of a window apart by engine, model, tenant or input length."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Protocol

from fastapi import APIRouter, Depends, Query
from pydantic import Field

from agent.analysis.quantiles import RELATIVE_ERROR
from agent.analysis.summary import summarise
from agent.analysis.tally import ALL_OBJECTIVES, Tally
from agent.outputs.api import answers as a
from agent.outputs.api.answer import Answer
from agent.outputs.api.asking import WindowText, selection, window_before, window_s
from agent.records.questions import Dimension, Selection, Window

By = Annotated[Dimension, Query(description="what to tell the requests apart by")]
Most = Annotated[int, Query(ge=1, le=1000, description="groups told, the busiest first")]


class GroupAnswer(a.Figures):
    """The figures of requests that have something in common."""

    group: str | None = Field(
        description="the engine, model, tenant or input length; null where that is not known"
    )


class BreakdownAnswer(Answer):
    """The figures of a window by engine, model, tenant or input length; no group is empty.

    Input lengths are in tokens of 1k = 1024, a group holds its lower edge: 0-1k, 1k-4k, 4k-16k,
    16k-64k, 64k+.
    """

    window_from: datetime
    window_until: datetime
    window_s: float
    relative_error: float = Field(description="of the percentiles")
    by: Dimension
    groups: list[GroupAnswer] = Field(description="those with the most requests first")
    left_out: int = Field(description="groups with fewer requests than those that are told")


class BreakdownQuestions(Protocol):
    """What is asked of the store about groups of requests."""

    def grid_s(self, length_s: float) -> int:
        """The grid on which a window of this length must lie."""

    def tallies_by(
        self, dimension: Dimension, window: Window, selection: Selection
    ) -> Mapping[str | None, Tally]:
        """The counts of a window by engine, model and so on."""


def breakdown_routes(ask: BreakdownQuestions, now: Callable[[], float]) -> APIRouter:
    """What answers about groups of requests."""
    router = APIRouter(tags=["figures"])

    @router.get("/breakdown")
    def breakdown(
        chosen: Annotated[Selection, Depends(selection)],
        by: By = "input_length",
        window: WindowText = "5m",
        limit: Most = 100,
    ) -> BreakdownAnswer:
        """The figures of the summary for each engine, model, tenant or input length alone."""
        length_s = window_s(window)
        over = window_before(now(), length_s, ask.grid_s(length_s))
        groups = sorted(ask.tallies_by(by, over, chosen).items(), key=_busiest_first)
        return BreakdownAnswer(
            window_from=datetime.fromtimestamp(over.from_s, UTC),
            window_until=datetime.fromtimestamp(over.until, UTC),
            window_s=over.length_s,
            relative_error=RELATIVE_ERROR,
            by=by,
            groups=[_group(name, tally, over, chosen) for name, tally in groups[:limit]],
            left_out=len(groups[limit:]),
        )

    return router


def _busiest_first(group: tuple[str | None, Tally]) -> tuple[int, str]:
    name, tally = group
    return -tally.requests, name or ""


def _group(name: str | None, tally: Tally, over: Window, chosen: Selection) -> GroupAnswer:
    figures = summarise(tally, over.length_s, chosen.objective or ALL_OBJECTIVES)
    return GroupAnswer(group=name, **asdict(figures))
