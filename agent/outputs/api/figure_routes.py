"""API routes of figures: a window's summary, series, groups, input lengths, and objectives."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import Field

from agent.analysis.burn_rates import error_budget
from agent.analysis.quantiles import RELATIVE_ERROR
from agent.analysis.summary import TrafficLimit, check_traffic_limits, summarise
from agent.analysis.tally import ALL_OBJECTIVES, INPUT_LENGTHS, OUTPUT_LENGTHS, Tally
from agent.outputs.api.api_context import ApiContext, ApiQueries
from agent.outputs.api.base_responses import (
    BaseResponse,
    CauseResponse,
    ListOf,
    RequestFigures,
    cause_shares,
    causes_with_details,
)
from agent.outputs.api.efficiency_routes import (
    CostResponse,
    EfficiencyResponse,
    LedgerResponse,
    efficiency_and_cost,
)
from agent.outputs.api.engine_counts import (
    EngineCountsResponse,
    engine_counts_by_step,
    engine_counts_of,
)
from agent.outputs.api.query_parameters import (
    AskedWindow,
    StepText,
    asked_window,
    selection,
    window_before,
)
from agent.records.queries import (
    LengthVerdicts,
    Selection,
    Window,
)


class SummaryResponse(RequestFigures):
    """The figures of the requests that ended in a window."""

    window_from: datetime
    window_until: datetime
    window_s: float
    grid_s: int = Field(description="a step of this window is a multiple of it")
    data_from: datetime | None = Field(
        description="when the stored data begins, of the engine if one is chosen; null without data"
    )
    covered_s: float = Field(description="seconds of the window since data_from; 0 without data")
    relative_error: float = Field(description="of the percentiles")
    simulated: bool = Field(description="true if the engine is the simulator")
    mfu: float | None = Field(
        default=None,
        description="by the requests, over all counted time; by the engines' token counters if no "
        "request has a row",
    )
    mbu: float | None = Field(default=None, description="by the same source as mfu")
    efficiency: EfficiencyResponse | None = None
    cost: CostResponse | None = None
    ledger: LedgerResponse | None = None
    cause_details: list[CauseResponse] = Field(description="the most seconds first")
    engine_counts: EngineCountsResponse | None = Field(
        description="what engines counted themselves; null without any sample, and for one tenant "
        "or objective"
    )


class StepResponse(RequestFigures):
    """The figures of one step of a time series, which starts at `at`."""

    at: datetime
    window_s: float = Field(description="seconds of the step so far")
    covered_s: float = Field(
        description="those of them since the stored data begins, of the engine if one is chosen"
    )
    engine_counts: EngineCountsResponse | None = Field(
        description="as in the summary, of steps of whole minutes; null if any request of the "
        "window has a row"
    )


Chosen = Annotated[Selection, Depends(selection)]
LastMinutes = Annotated[AskedWindow, asked_window("5m")]
LastHour = Annotated[AskedWindow, asked_window("1h")]


def figure_routes(context: ApiContext) -> APIRouter:
    """The routes of the summary and of the time series."""
    router = APIRouter(tags=["figures"])

    @router.get("/summary")
    def summary(chosen: Chosen, asked: LastMinutes) -> SummaryResponse:
        """The figures of the requests that ended in the window: in the last while, or any."""
        now, longest_s = context.now(), context.longest_window_s

        def figures(queries: ApiQueries) -> SummaryResponse:
            over = asked.over(now, longest_s, queries.grid_s)
            return summary_over(context, queries, chosen, over)

        return context.read(figures)

    @router.get("/timeseries")
    def timeseries(chosen: Chosen, asked: LastHour, step: StepText = "1m") -> ListOf[StepResponse]:
        """The figures of the summary by step; if the window ends now, the last is not over yet."""
        now, longest_s = context.now(), context.longest_window_s

        def steps(queries: ApiQueries) -> list[StepResponse]:
            over, each_s = asked.in_steps(step, now, longest_s, queries.grid_s)
            return list(_steps(queries, over, each_s, chosen))

        return ListOf[StepResponse](items=context.read(steps))

    return router


def summary_over(
    context: ApiContext, queries: ApiQueries, chosen: Selection, over: Window
) -> SummaryResponse:
    """The figures of the requests that ended in a window."""
    data_from = queries.data_from(over, chosen.source)
    covered_s = over.covered_s(data_from)
    counted = engine_counts_of(queries, over, chosen)
    figures = figures_of(queries.tally(over, chosen), covered_s, chosen, counted)
    return SummaryResponse(
        **stated(over),
        grid_s=queries.grid_s(context.now() - over.from_s),
        data_from=None if data_from is None else _utc(data_from),
        relative_error=RELATIVE_ERROR,
        simulated=context.simulated,
        **figures,
        **causes_with_details(queries.causes(over, chosen)),
        **efficiency_and_cost(queries, over, chosen),
        engine_counts=counted,
    )


_RATES = (
    *("violations_per_min", "goodput_rps", "goodput_tokens_per_s", "throughput_rps"),
    *("input_tokens_per_s", "output_tokens_per_s"),
)


def figures_of(
    tally: Tally,
    covered_s: float,
    chosen: Selection,
    counted: EngineCountsResponse | None = None,
) -> dict[str, Any]:
    """The figures of rows. Their rates are unknown, not 0, if engines work and no row shows it."""
    figures = asdict(summarise(tally, covered_s, chosen.objective or ALL_OBJECTIVES))
    if counted is not None and not tally.requests and (counted.requests or counted.running):
        figures |= dict.fromkeys(_RATES)
    return {"covered_s": covered_s, **figures}


def _steps(
    queries: ApiQueries, over: Window, step_s: int, chosen: Selection
) -> Iterator[StepResponse]:
    data_from = queries.data_from(over, chosen.source)
    causes = queries.causes_by_step(over, step_s, chosen)
    tallies = queries.tallies_by_step(over, step_s, chosen)
    # A fleet's counts of each minute take seconds to read, and rows win where there are any.
    has_rows = any(tally.requests for tally in tallies.values())
    counted = {} if has_rows else engine_counts_by_step(queries, over, step_s, chosen)
    for start, tally in tallies.items():
        step = Window(from_s=start, until=min(over.until, start + step_s))
        covered_s = step.covered_s(data_from)
        yield StepResponse(
            at=_utc(start),
            window_s=step.length_s,
            **figures_of(tally, covered_s, chosen, counted.get(start)),
            **cause_shares(causes.get(start, {})),
            engine_counts=counted.get(start),
        )


def stated(over: Window) -> dict[str, Any]:
    """The fields that say which window a response is of."""
    return {
        "window_from": _utc(over.from_s),
        "window_until": _utc(over.until),
        "window_s": over.length_s,
    }


def _utc(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def any_second(_age_s: float) -> int:
    """The grid of windows of rows."""
    return 1


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
    one_in: int = Field(description="one in so many requests was counted; 1 if all were")
    input_lengths: list[str] = Field(description="all of them, the shortest first")
    output_lengths: list[str]
    items: list[LengthVerdictsResponse]


def length_routes(context: ApiContext) -> APIRouter:
    """The route of lengths of requests whose rows are kept."""
    router = APIRouter(tags=["figures"])

    @router.get("/lengths")
    def lengths(chosen: Chosen, asked: LastHour) -> LengthsResponse:
        """How many requests met and missed, by input and output length.

        Of more than 50,000 requests a sample is counted.
        """
        over = asked.over(context.now(), context.longest_row_window_s, any_second)

        def counted(queries: ApiQueries) -> tuple[int, Sequence[LengthVerdicts]]:
            on_grid = asked.over(context.now(), context.longest_row_window_s, queries.grid_s)
            total = queries.tally(on_grid, chosen).requests
            return queries.verdicts_by_length(over, chosen, total)

        one_in, found = context.read(counted)
        return LengthsResponse(
            **stated(over),
            one_in=one_in,
            input_lengths=list(INPUT_LENGTHS),
            output_lengths=list(OUTPUT_LENGTHS),
            items=[_of_lengths(each) for each in found],
        )

    return router


def _of_lengths(verdicts: LengthVerdicts) -> LengthVerdictsResponse:
    judged = verdicts.met + verdicts.missed
    attainment = verdicts.met / judged if judged else None
    return LengthVerdictsResponse(**asdict(verdicts), attainment=attainment)


Row = Mapping[str, Any]


class BudgetResponse(BaseResponse):
    """The error budget of an objective over its own window, up to the end of the shown one."""

    window_s: float
    covered_s: float = Field(description="seconds of it since the stored data begins")
    met: int
    missed: int
    allowed: float = Field(description="misses that the target allows of those met and missed")
    left: float | None = Field(
        description="share of the allowed misses that is left, below 0 if there were more; null "
        "without judged requests"
    )


class ObjectiveResponse(BaseResponse):
    """An objective that an agent judges by now, and its attainment in the window."""

    name: str
    agent: str
    in_force_from: datetime
    definition: Mapping[str, Any]
    window_s: float
    covered_s: float = Field(description="seconds of the window since the stored data begins")
    requests: int
    met: int
    missed: int
    undetermined: int
    attainment: float | None = Field(description="met / (met + missed)")
    violations_per_min: float | None = Field(description="missed requests per covered minute")
    budget: BudgetResponse
    traffic: list[TrafficLimit]


def objective_routes(context: ApiContext) -> APIRouter:
    """The route of objectives."""
    router = APIRouter(tags=["figures"])

    @router.get("/objectives")
    def objectives(chosen: Chosen, asked: LastMinutes) -> ListOf[ObjectiveResponse]:
        """The objectives now in force, and their attainment in the window.

        Attainment and budget are of the chosen requests, by default of those of all agents. The
        window of the budget ends with the window.
        """
        now, longest_s = context.now(), context.longest_window_s

        def found(queries: ApiQueries) -> list[ObjectiveResponse]:
            over = asked.over(now, longest_s, queries.grid_s)
            return objectives_over(queries, now, over, chosen)

        return ListOf[ObjectiveResponse](items=context.read(found))

    return router


class _CachedCounts:
    """Counts of windows, each queried once: agents of a fleet have the same objectives."""

    def __init__(self, queries: ApiQueries, now: float) -> None:
        self._grid_s = queries.grid_s
        self._now = now
        self._data_from = cache(queries.data_from)
        self._tally = cache(queries.tally)

    def ending_with(self, over: Window, length_s: float) -> Window:
        """The window of this length that ends with another one."""
        if over.ends_now:
            return window_before(over.until, length_s, self._grid_s(length_s))
        grid_s = self._grid_s(self._now - over.until + length_s)
        from_s = round((over.until - length_s) / grid_s) * grid_s
        return Window(from_s=min(from_s, int(over.until)), until=over.until)

    def of(self, over: Window, chosen: Selection) -> tuple[float, Tally]:
        """The seconds of a window that are covered by data, and its counts."""
        covered_s = over.covered_s(self._data_from(over, chosen.source))
        return covered_s, self._tally(over, chosen)


def objectives_over(
    queries: ApiQueries, now: float, over: Window, chosen: Selection
) -> list[ObjectiveResponse]:
    """The chosen objectives now in force, and their attainment in a window."""
    counts = _CachedCounts(queries, now)
    return [
        _objective(row, over, replace(chosen, objective=row["name"]), counts)
        for row in queries.objectives_in_force()
        if chosen.agent in (None, row["agent"]) and chosen.objective in (None, row["name"])
    ]


def _objective(
    row: Row, over: Window, chosen: Selection, counts: _CachedCounts
) -> ObjectiveResponse:
    covered_s, tally = counts.of(over, chosen)
    figures = summarise(tally, covered_s, row["name"])
    definition = row["definition"]
    traffic = check_traffic_limits(
        figures, definition["max_error_ratio"], definition["min_output_tokens_per_s"]
    )
    return ObjectiveResponse(
        **row,
        window_s=over.length_s,
        covered_s=covered_s,
        requests=figures.requests,
        met=figures.met,
        missed=figures.missed,
        undetermined=figures.undetermined,
        attainment=figures.attainment,
        violations_per_min=figures.violations_per_min,
        budget=_budget(definition, over, chosen, counts),
        traffic=list(traffic),
    )


def _budget(
    definition: Row, shown: Window, chosen: Selection, counts: _CachedCounts
) -> BudgetResponse:
    over = counts.ending_with(shown, definition["window_s"])
    covered_s, tally = counts.of(over, chosen)
    found = summarise(tally, over.length_s, chosen.objective or "")
    return BudgetResponse(
        window_s=over.length_s,
        covered_s=covered_s,
        **asdict(error_budget(found.met, found.missed, definition["target"])),
    )
