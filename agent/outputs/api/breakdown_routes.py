"""The API route `/breakdown`: figures of a window by engine, model, tenant and so on."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Query
from pydantic import Field

from agent.analysis.cause_sums import CauseSums
from agent.analysis.exponential import exponential_from
from agent.analysis.quantiles import RELATIVE_ERROR
from agent.analysis.summary import summarise
from agent.analysis.tally import ALL_OBJECTIVES, Tally
from agent.outputs.api.base_response import BaseResponse
from agent.outputs.api.cause_response import CauseResponse, causes_with_details
from agent.outputs.api.query_parameters import WindowText, selection, window_before, window_s
from agent.outputs.api.request_figures import RequestFigures
from agent.records.queries import (
    OF_ROWS,
    DataSource,
    Dimension,
    GroupCost,
    Selection,
    Window,
)

By = Annotated[
    Dimension,
    Query(
        description="what to group the requests by. By user, workload, session and priority the "
        "rows themselves are read: the window is at most as long as they are kept, the 1000 "
        "busiest groups have figures of their own, and the rest is `other`"
    ),
]
Most = Annotated[
    int, Query(ge=1, le=1000, description="most groups in the response, the busiest first")
]


Costs = Annotated[bool, Query(description="add the cost of each group; this reads every row")]


class GroupCostResponse(BaseResponse):
    """The cost of a group's requests that ended in the window: their part of busy time.

    It is summed from rows that are kept and priced. Idle time belongs to no request.
    """

    requests: int = Field(description="rows with a known cost")
    cost_usd: float | None = Field(description="null without a price")
    gpu_hours: float | None


Histograms = Annotated[
    bool, Query(description="add the latencies of each group as histograms that add up")
]


class HistogramResponse(BaseResponse):
    """An exponential histogram of OpenTelemetry, in seconds; none lie below zero.

    Histograms of several agents add up bucket by bucket, and so do their percentiles.
    """

    scale: int
    zero_count: int
    zero_threshold: float
    offset: int = Field(description="of the first bucket: bucket i ends at 2**((i + 1) / 2**scale)")
    bucket_counts: list[int]


class GroupResponse(RequestFigures):
    """The figures of one group."""

    group: str | None = Field(
        description="the engine, model, tenant and so on; null where it is unknown"
    )
    covered_s: float = Field(
        description="seconds of the window since the stored data begins, an engine's own by engine"
    )
    cause_details: list[CauseResponse] = Field(description="the most seconds first")
    cost: GroupCostResponse | None = Field(default=None, description="null unless requested")
    histograms: dict[str, HistogramResponse] | None = Field(
        default=None,
        description="by latency: ttft_s, tpot_s, e2e_s, queue_s; null unless requested",
    )


class BreakdownResponse(BaseResponse):
    """The figures of a window by engine, model, tenant and so on; no group is empty.

    Input lengths are 0-1k, 1k-4k, 4k-16k, 16k-64k and 64k+ tokens. 1k is 1024, and a group
    includes its lower edge.
    """

    window_from: datetime
    window_until: datetime
    window_s: float
    relative_error: float = Field(description="of the percentiles")
    by: Dimension
    groups: list[GroupResponse] = Field(description="the most requests first")
    left_out: int = Field(description="groups beyond the limit")


class BreakdownQueries(Protocol):
    """The store's queries of groups of requests, and when their data begins."""

    def grid_s(self, length_s: float) -> int:
        """The grid on which a window of this length must lie."""

    def data_from(self, window: Window, source: DataSource) -> float | None:
        """When the data begins, of one agent, engine or of all, in Unix seconds."""

    def tallies_by(
        self, dimension: Dimension, window: Window, selection: Selection
    ) -> Mapping[str | None, Tally]:
        """The counts of a window by engine, model and so on."""

    def causes_by(
        self, dimension: Dimension, window: Window, selection: Selection
    ) -> Mapping[str | None, CauseSums]:
        """The sums of the causes of misses in a window by engine, model and so on."""

    def costs_by(
        self, dimension: Dimension, window: Window, selection: Selection
    ) -> Mapping[str | None, GroupCost]:
        """The cost of the requests of a window by engine, model and so on."""


def breakdown_routes(
    queries: BreakdownQueries, now: Callable[[], float], longest_s: float, rows_kept_s: float
) -> APIRouter:
    """The route of groups, in windows of up to `longest_s`, of rows `rows_kept_s`."""
    router = APIRouter(tags=["figures"])

    @router.get("/breakdown")
    def breakdown(
        chosen: Annotated[Selection, Depends(selection)],
        by: By = "input_length",
        window: WindowText = "5m",
        limit: Most = 100,
        *,
        cost: Costs = False,
        histograms: Histograms = False,
    ) -> BreakdownResponse:
        """The figures of the summary for each engine, model, tenant and so on."""
        kept_s = min(rows_kept_s, longest_s) if by in OF_ROWS else longest_s
        over = _window(queries, by, window, now(), kept_s)
        costs = queries.costs_by(by, over, chosen) if cost else {}
        causes = queries.causes_by(by, over, chosen)
        covered_s = _covered_s(queries, by, over, chosen)
        groups = sorted(queries.tallies_by(by, over, chosen).items(), key=_busiest_first)
        return BreakdownResponse(
            **_stated(over),
            by=by,
            groups=[
                GroupResponse(
                    group=name,
                    cost=_cost(costs.get(name)),
                    histograms=_histograms(tally) if histograms else None,
                    **_figures(tally, covered_s(name), chosen),
                    **causes_with_details(causes.get(name, {})),
                )
                for name, tally in groups[:limit]
            ],
            left_out=len(groups[limit:]),
        )

    return router


def _stated(over: Window) -> dict[str, Any]:
    return {
        "window_from": datetime.fromtimestamp(over.from_s, UTC),
        "window_until": datetime.fromtimestamp(over.until, UTC),
        "window_s": over.length_s,
        "relative_error": RELATIVE_ERROR,
    }


def _window(
    queries: BreakdownQueries, by: Dimension, text: str, now: float, longest_s: float
) -> Window:
    length_s = window_s(text, longest_s)
    return window_before(now, length_s, 1 if by in OF_ROWS else queries.grid_s(length_s))


def _covered_s(
    queries: BreakdownQueries, by: Dimension, over: Window, chosen: Selection
) -> Callable[[str | None], float]:
    """Seconds of the window since the data of a group begins."""

    @cache
    def since(source: DataSource) -> float:
        return over.covered_s(queries.data_from(over, source))

    grouped = by in ("agent", "engine")
    return lambda group: since(replace(chosen.source, **{by: group}) if grouped else chosen.source)


def _busiest_first(group: tuple[str | None, Tally]) -> tuple[int, str]:
    name, tally = group
    return -tally.requests, name or ""


def _figures(tally: Tally, covered_s: float, chosen: Selection) -> dict[str, Any]:
    figures = summarise(tally, covered_s, chosen.objective or ALL_OBJECTIVES)
    return {"covered_s": covered_s, **asdict(figures)}


def _histograms(tally: Tally) -> dict[str, HistogramResponse]:
    return {
        name: HistogramResponse(**asdict(exponential_from(bins)))
        for name, bins in tally.bins.items()
    }


def _cost(cost: GroupCost | None) -> GroupCostResponse | None:
    return None if cost is None else GroupCostResponse(**asdict(cost))
