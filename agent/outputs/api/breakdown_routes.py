"""API route of the figures of a window by engine, model, tenant, user and so on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cache
from operator import itemgetter
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field

from agent.analysis.quantiles import RELATIVE_ERROR, exponential_from, quantile
from agent.analysis.tally import ALL_OBJECTIVES, Tally
from agent.catalog.definitions import Verdict
from agent.catalog.time_units import DAY_S
from agent.outputs.api.api_context import ApiContext, ApiQueries
from agent.outputs.api.base_responses import (
    BaseResponse,
    CauseResponse,
    RequestFigures,
    causes_with_details,
)
from agent.outputs.api.figure_routes import Chosen, LastMinutes, any_second, figures_of, stated
from agent.outputs.api.problems import refuse
from agent.outputs.api.query_parameters import AskedWindow
from agent.records.queries import (
    OF_ROWS,
    DataSource,
    Dimension,
    GroupCache,
    GroupCost,
    Selection,
    Window,
    times_one_in,
)

By = Annotated[
    Dimension,
    Query(
        description="what to group the requests by. By user, workload, session and priority the "
        "rows themselves are read: the window is at most as long as they are kept, the 1000 "
        "busiest groups have figures of their own, and the rest is `other`; of more than 100,000 "
        "requests the latencies are of a sample (`times_one_in`)"
    ),
]
Most = Annotated[int, Query(ge=1, le=1000, description="most groups in the response")]
_LATENCIES = ("ttft", "tpot", "e2e")
_COUNTS = ("requests", "missed", "attainment", "input_tokens", "output_tokens", "cost")
_SORT_KEYS = "|".join(("group", *_COUNTS, *_LATENCIES))
SortText = Annotated[
    str,
    Query(
        pattern=f"^-?({_SORT_KEYS})$",
        description="what groups are sorted by, the lowest first, or with `-` the highest; "
        "latencies by their p95. Groups of which it is unknown are the last",
    ),
]
Costs = Annotated[bool, Query(description="add the cost of each group; this reads every row")]


Caches = Annotated[
    bool, Query(description="add the cached tokens of each group; this reads every row")
]
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


class TenantBudgetResponse(BaseResponse):
    """What a tenant may spend in 30 days, and will at the rate of this window."""

    usd_per_month: float
    forecast_usd_per_month: float | None = Field(description="null without a cost")
    used_ratio: float | None = Field(description="the forecast over the budget")


class GroupResponse(RequestFigures):
    """The figures of one group."""

    group: str | None = Field(
        description="the engine, model, tenant and so on; null if it is unknown"
    )
    covered_s: float = Field(
        description="seconds of the window since the stored data begins, an engine's own by engine"
    )
    cause_details: list[CauseResponse] = Field(description="the most seconds first")
    input_tokens: int | None = Field(description="null if no request has a count")
    output_tokens: int | None = Field(description="null if no request has a count")
    cost: GroupCost | None = Field(default=None, description="null unless requested")
    cache: GroupCache | None = Field(
        default=None,
        description="null unless requested, and of a group without a row that has cached tokens",
    )
    budget: TenantBudgetResponse | None = Field(
        default=None, description="of a tenant with one in tenant_budgets, if cost is requested"
    )
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
    times_one_in: int = Field(
        description="percentiles and histograms are of one in so many requests; 1 if of all. "
        "Counts are of all requests"
    )
    by: Dimension
    groups: list[GroupResponse] = Field(description="as sorted; the most requests first")
    left_out: int = Field(description="groups beyond the limit")


def breakdown_routes(context: ApiContext) -> APIRouter:
    """The route of groups of requests."""
    router = APIRouter(tags=["figures"])

    @router.get("/breakdown")
    def breakdown(
        chosen: Chosen,
        asked: LastMinutes,
        by: By = "input_length",
        sort: SortText = "-requests",
        limit: Most = 100,
        *,
        cost: Costs = False,
        cache: Caches = False,
        histograms: Histograms = False,
    ) -> BreakdownResponse:
        """The figures of the summary for each engine, model, tenant and so on."""
        if sort.endswith("cost") and not cost:
            raise refuse("sort: cost is known with cost=true alone")

        def groups_of(queries: ApiQueries) -> BreakdownResponse:
            over = _group_window(context, queries, by, asked)
            groups = _groups(queries, by, over, chosen, cost=cost, cache=cache)
            found = _sorted(groups, sort, chosen.objective or ALL_OBJECTIVES)
            budgets = context.tenant_budgets if by == "tenant" else {}
            response_of = _responses(queries, by, over, chosen, budgets, histograms=histograms)
            return BreakdownResponse(
                **_stated_groups(over, by),
                times_one_in=_times_one_in(by, groups),
                groups=[response_of(each) for each in found[:limit]],
                left_out=len(found[limit:]),
            )

        return context.read(groups_of)

    return router


@dataclass(frozen=True, slots=True)
class _UnsortedGroup:
    """A group before its figures are computed, which takes longer than to sort it."""

    name: str | None
    tally: Tally
    cost: GroupCost | None
    cache: GroupCache | None

    @property
    def input_tokens(self) -> int | None:
        return self.tally.input_tokens if self.tally.input_tokens_known else None

    @property
    def output_tokens(self) -> int | None:
        return self.tally.output_tokens if self.tally.output_tokens_known else None

    def verdicts(self, verdict: Verdict, objective: str) -> int:
        counts = self.tally.verdicts.get((objective, verdict))
        return 0 if counts is None else counts.requests

    def sort_value(self, key: str, objective: str) -> float | str | None:
        if key in _LATENCIES:
            return quantile(self.tally.bins.get(f"{key}_s", {}), 0.95)
        missed = self.verdicts(Verdict.MISSED, objective)
        judged = missed + self.verdicts(Verdict.MET, objective)
        values = {
            "group": self.name,
            "requests": self.tally.requests,
            "missed": missed,
            "attainment": 1 - missed / judged if judged else None,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "cost": None if self.cost is None else self.cost.cost_usd,
        }
        return values[key]


def _groups(
    queries: ApiQueries,
    by: Dimension,
    over: Window,
    chosen: Selection,
    *,
    cost: bool,
    cache: bool,
) -> list[_UnsortedGroup]:
    costs = queries.costs_by(by, over, chosen) if cost else {}
    caches = queries.caches_by(by, over, chosen) if cache else {}
    # An engine that only prefills has costs, and no request of its own.
    of_hops = {name: Tally() for name, each in costs.items() if not each.requests}
    tallies = {**of_hops, **queries.tallies_by(by, over, chosen)}
    return [
        _UnsortedGroup(name, tally, costs.get(name), caches.get(name))
        for name, tally in tallies.items()
    ]


_MONTH_S = 30.0 * DAY_S


def _budget(
    usd_per_month: float | None, cost: GroupCost | None, covered_s: float
) -> TenantBudgetResponse | None:
    """The forecast goes on at the rate of the window."""
    if usd_per_month is None or cost is None:
        return None
    forecast = cost.cost_usd and covered_s and cost.cost_usd / covered_s * _MONTH_S
    return TenantBudgetResponse(
        usd_per_month=usd_per_month,
        forecast_usd_per_month=forecast,
        used_ratio=None if forecast is None else forecast / usd_per_month,
    )


def _responses(
    queries: ApiQueries,
    by: Dimension,
    over: Window,
    chosen: Selection,
    budgets: Mapping[str, float],
    *,
    histograms: bool,
) -> Callable[[_UnsortedGroup], GroupResponse]:
    causes = queries.causes_by(by, over, chosen)
    covered_s = _group_covered_s(queries, by, over, chosen)

    def response(group: _UnsortedGroup) -> GroupResponse:
        return GroupResponse(
            group=group.name,
            cost=group.cost,
            cache=group.cache,
            budget=_budget(budgets.get(group.name or ""), group.cost, covered_s(group.name)),
            input_tokens=group.input_tokens,
            output_tokens=group.output_tokens,
            histograms=_histograms(group.tally) if histograms else None,
            **figures_of(group.tally, covered_s(group.name), chosen),
            **causes_with_details(causes.get(group.name, {})),
        )

    return response


def _group_window(
    context: ApiContext, queries: ApiQueries, by: Dimension, asked: AskedWindow
) -> Window:
    if by in OF_ROWS:
        return asked.over(context.now(), context.longest_row_window_s, any_second)
    return asked.over(context.now(), context.longest_window_s, queries.grid_s)


def _stated_groups(over: Window, by: Dimension) -> dict[str, Any]:
    return {**stated(over), "relative_error": RELATIVE_ERROR, "by": by}


def _group_covered_s(
    queries: ApiQueries, by: Dimension, over: Window, chosen: Selection
) -> Callable[[str | None], float]:
    """Seconds of the window since the data of a group begins."""

    @cache
    def since(source: DataSource) -> float:
        return over.covered_s(queries.data_from(over, source))

    grouped = by in ("agent", "engine")
    return lambda group: since(replace(chosen.source, **{by: group}) if grouped else chosen.source)


def _times_one_in(by: Dimension, groups: Sequence[_UnsortedGroup]) -> int:
    return times_one_in(sum(each.tally.requests for each in groups)) if by in OF_ROWS else 1


def _sorted(groups: list[_UnsortedGroup], sort: str, objective: str) -> list[_UnsortedGroup]:
    """Sorted by a value and then by name, those of which it is unknown last."""
    values = {each.name: each.sort_value(sort.removeprefix("-"), objective) for each in groups}
    by_name = sorted(groups, key=lambda each: each.name or "")
    known: list[tuple[Any, _UnsortedGroup]] = [
        (value, each) for each in by_name if (value := values[each.name]) is not None
    ]
    unknown = [each for each in by_name if values[each.name] is None]
    known.sort(key=itemgetter(0), reverse=sort.startswith("-"))
    return [each for _, each in known] + unknown


def _histograms(tally: Tally) -> dict[str, HistogramResponse]:
    return {
        name: HistogramResponse(**asdict(exponential_from(bins)))
        for name, bins in tally.bins.items()
    }
