"""The HTTP API: typed answers to bounded questions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse

from agent.analysis.quantiles import RELATIVE_ERROR
from agent.analysis.summary import summarise, traffic_promises
from agent.analysis.tally import ALL_OBJECTIVES, Tally
from agent.outputs.api import answers as a
from agent.outputs.api.asking import (
    CursorText,
    Limit,
    Name,
    WindowText,
    cursor_of,
    cursor_text,
    selection,
    step_s,
    window_before,
    window_s,
)
from agent.outputs.api.breakdown import BreakdownQuestions, breakdown_routes
from agent.outputs.api.efficiency import efficiency_and_cost
from agent.outputs.api.gpu_routes import GpuQuestions, gpu_routes
from agent.outputs.api.refusing import REFUSALS, add_refusals
from agent.outputs.api.requests import RequestQuestions, request_routes
from agent.outputs.api.runbooks import runbook_routes
from agent.records.questions import Cursor, PageOf, Selection, Window
from agent.records.window import EngineWindow

Row = Mapping[str, Any]


class Questions(RequestQuestions, GpuQuestions, BreakdownQuestions, Protocol):
    """What the API asks of the store."""

    def tally(self, window: Window, selection: Selection) -> Tally:
        """The counts of a window."""

    def tallies_by_step(
        self, window: Window, step_s: int, selection: Selection
    ) -> dict[int, Tally]:
        """The counts of each step of a window."""

    def events(
        self,
        after: Cursor | None,
        limit: int,
        *,
        engine: str | None,
        gpu: str | None,
        kind: str | None,
        confidence: str | None,
    ) -> PageOf[Row]:
        """Events, the newest first."""

    def objectives_in_force(self) -> Sequence[Row]:
        """The objectives of all agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the API is given: the store's answers, the clock, and the other outputs.

    Figures are there for windows of up to `longest_window_s`.
    """

    questions: Questions
    windows: Callable[[Window, Selection], Sequence[EngineWindow]]
    now: Callable[[], float]
    longest_window_s: float
    metrics: Callable[[str], tuple[bytes, str]]
    engines: Callable[[], Sequence[Row]]
    problems: Callable[[], Sequence[str]]
    page: str
    runbooks: Mapping[str, str]
    version: str
    simulated: bool


Chosen = Annotated[Selection, Depends(selection)]


def make_api(around: Surroundings) -> FastAPI:
    """The application: page, metrics, health and `/api/v1`."""
    api = FastAPI(
        title="goodput-agent",
        version=around.version,
        description="Goodput, latency and events of the watched LLM inference servers.",
    )
    api.include_router(_operations(around))
    api.include_router(runbook_routes(around.runbooks))
    routers = (
        _figures(around),
        breakdown_routes(around.questions, around.now, around.longest_window_s),
        _promises(around),
        request_routes(around.questions),
        _lists(around),
        gpu_routes(around.questions, around.now, around.longest_window_s),
    )
    for router in routers:
        api.include_router(router, prefix="/api/v1", responses=dict(REFUSALS))
    add_refusals(api)
    return api


# What FastAPI cannot know of a page that is no JSON.
_PAGE: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            media_type: {"schema": {"type": "string"}}
            for media_type in ("text/plain", "application/openmetrics-text")
        }
    }
}


def _operations(around: Surroundings) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    def page() -> str:
        """The first page."""
        return around.page

    @router.get("/metrics", response_class=Response, responses=_PAGE)
    def metrics(request: Request) -> Response:
        """The metrics page, in Prometheus text or, where asked for, OpenMetrics with exemplars."""
        body, content_type = around.metrics(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    @router.get("/healthz")
    async def healthz() -> a.HealthAnswer:
        """Answers while the process lives, also when every thread waits for the database."""
        return a.HealthAnswer(status="ok", problems=[])

    @router.get("/readyz", responses={503: {"model": a.HealthAnswer}})
    def readyz(response: Response) -> a.HealthAnswer:
        """Whether spans can be received and stored now."""
        problems = list(around.problems())
        response.status_code = 503 if problems else 200
        return a.HealthAnswer(status="not ready" if problems else "ok", problems=problems)

    return router


def _figures(around: Surroundings) -> APIRouter:
    router = APIRouter(tags=["figures"])
    ask = around.questions

    @router.get("/summary")
    def summary(chosen: Chosen, window: WindowText = "5m") -> a.SummaryAnswer:
        """What users got in the last while, counted by the time that requests ended."""
        length_s = window_s(window, around.longest_window_s)
        over = window_before(around.now(), length_s, ask.grid_s(length_s))
        figures = _figures_of(ask.tally(over, chosen), over.length_s, chosen)
        return a.SummaryAnswer(
            window_from=_moment(over.from_s),
            window_until=_moment(over.until),
            window_s=over.length_s,
            relative_error=RELATIVE_ERROR,
            simulated=around.simulated,
            **figures,
            **efficiency_and_cost(around.windows, over, chosen),
        )

    @router.get("/timeseries")
    def timeseries(
        chosen: Chosen, window: WindowText = "1h", step: str = "1m"
    ) -> a.ListOf[a.StepAnswer]:
        """The same figures step by step; the last step is not over yet."""
        length_s = window_s(window, around.longest_window_s)
        each_s = step_s(step, length_s, ask.grid_s(length_s))
        over = window_before(around.now(), length_s, each_s)
        steps = ask.tallies_by_step(over, each_s, chosen)
        return a.ListOf[a.StepAnswer](
            items=[_step(start, each_s, over, tally, chosen) for start, tally in steps.items()]
        )

    return router


def _figures_of(tally: Tally, length_s: float, chosen: Selection) -> dict[str, Any]:
    return asdict(summarise(tally, length_s, chosen.objective or ALL_OBJECTIVES))


def _promises(around: Surroundings) -> APIRouter:
    router = APIRouter(tags=["figures"])
    ask = around.questions

    @router.get("/objectives")
    def objectives(window: WindowText = "5m") -> a.ListOf[a.ObjectiveAnswer]:
        """What is promised now, and whether it held in the last while."""
        length_s = window_s(window, around.longest_window_s)
        over = window_before(around.now(), length_s, ask.grid_s(length_s))
        return a.ListOf[a.ObjectiveAnswer](
            items=[_objective(row, over, ask) for row in ask.objectives_in_force()]
        )

    return router


def _step(start: int, step_s: int, over: Window, tally: Tally, chosen: Selection) -> a.StepAnswer:
    passed = Window(from_s=start, until=min(over.until, start + step_s)).length_s
    figures = _figures_of(tally, passed, chosen)
    return a.StepAnswer(at=_moment(start), window_s=passed, **figures)


def _objective(row: Row, over: Window, ask: Questions) -> a.ObjectiveAnswer:
    chosen = Selection(objective=row["name"])
    figures = summarise(ask.tally(over, chosen), over.length_s, row["name"])
    promised = row["definition"]
    traffic = traffic_promises(
        figures, promised["max_error_ratio"], promised["min_output_tokens_per_s"]
    )
    return a.ObjectiveAnswer(
        **row,
        window_s=over.length_s,
        requests=figures.requests,
        met=figures.met,
        missed=figures.missed,
        undetermined=figures.undetermined,
        attainment=figures.attainment,
        traffic=[a.TrafficPromiseAnswer(**asdict(promise)) for promise in traffic],
    )


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def _lists(around: Surroundings) -> APIRouter:
    router = APIRouter(tags=["lists"])
    ask = around.questions

    @router.get("/events")
    def events(
        *,
        engine: Name = None,
        gpu: Name = None,
        kind: Name = None,
        confidence: a.Confidence | None = None,
        limit: Limit = 100,
        cursor: CursorText = None,
    ) -> a.ListOf[a.EventAnswer]:
        """Events, the newest first."""
        page = ask.events(
            cursor_of(cursor),
            limit,
            engine=engine or None,
            gpu=gpu or None,
            kind=kind or None,
            confidence=confidence,
        )
        return a.ListOf[a.EventAnswer](
            items=[a.EventAnswer(**row) for row in page.items], next=cursor_text(page.next)
        )

    @router.get("/engines")
    def engines() -> a.ListOf[a.EngineAnswer]:
        """The engines that this agent watches."""
        return a.ListOf[a.EngineAnswer](items=[a.EngineAnswer(**row) for row in around.engines()])

    return router
