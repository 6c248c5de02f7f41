"""API routes of charts over time: phases of requests, load of engines, use of GPUs."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from math import fsum

from fastapi import APIRouter
from pydantic import Field

from agent.analysis.engine_figures import figures_of_rows
from agent.analysis.phase_means import PhaseMeans, RequestPhases, median_and_slowest
from agent.outputs.api.api_context import ApiContext, ApiQueries
from agent.outputs.api.base_responses import BaseResponse, ListOf
from agent.outputs.api.figure_routes import Chosen, LastHour
from agent.outputs.api.query_parameters import Name, StepText
from agent.records.engine_counts import CountsRow
from agent.records.gpu import GpuUse
from agent.records.minute import MINUTE_LENGTH_S
from agent.records.queries import Selection, Window


class PhasesResponse(BaseResponse):
    """Mean seconds of the phases of some requests."""

    requests: int
    e2e_s: float
    network_s: float | None = Field(
        description="what the user waited beyond the engine; null without the user's view"
    )
    front_s: float = Field(description="in the engine's API server, outside its core")
    queue_s: float
    prefill_s: float
    decode_s: float


class PhaseStepResponse(BaseResponse):
    """The phases of the requests that ended in a step, which starts at `at`."""

    at: datetime
    median: PhasesResponse | None = Field(
        description="means of the middle fifth by end-to-end time; null without any request"
    )
    slowest: PhasesResponse | None = Field(description="means of the slowest 5 %, at least one")


class PhaseSeriesResponse(BaseResponse):
    """Where the time of requests went, by step."""

    items: list[PhaseStepResponse]
    one_in: int = Field(description="one in so many requests was read; 1 if all were")
    read: int = Field(description="requests that were read")
    without: int = Field(description="of these, requests whose phases no engine told")


class LoadStepResponse(BaseResponse):
    """Means over a step, which starts at `at`; null is what no engine reports."""

    at: datetime
    running: float | None = Field(description="requests in all batches together")
    waiting: float | None
    kv_cache_usage: float | None = Field(description="of the fullest engine, 0 to 1")


class GpuStepResponse(BaseResponse):
    """How busy a GPU was in a step, which starts at `at`."""

    at: datetime
    busy: float | None = Field(description="mean of its samples, 0 to 1; null if unknown")


class GpuStripResponse(BaseResponse):
    """A GPU over time."""

    gpu: str
    index: int
    name: str
    agent: str
    items: list[GpuStepResponse] = Field(description="steps with a sample")


def timeline_routes(context: ApiContext) -> APIRouter:
    """The route of phases by step."""
    router = APIRouter(tags=["figures"])

    @router.get("/phases")
    def phases(chosen: Chosen, asked: LastHour, step: StepText = "1m") -> PhaseSeriesResponse:
        """Front, queue, prefill, decode and network of the median and of the slowest requests.

        Of very many requests a sample is read. The window is at most as long as rows are kept.
        """

        def series(queries: ApiQueries) -> PhaseSeriesResponse:
            over, step_s = asked.in_steps(
                step, context.now(), context.longest_row_window_s, queries.grid_s
            )
            return _phase_series(queries, over, step_s, chosen)

        return context.read(series)

    return router


def load_routes(context: ApiContext) -> APIRouter:
    """The routes of the load of engines and GPUs by step."""
    router = APIRouter(tags=["figures"])
    now, longest_s = context.now, context.longest_window_s

    @router.get("/load")
    def load(chosen: Chosen, asked: LastHour, step: StepText = "1m") -> ListOf[LoadStepResponse]:
        """Running and waiting requests and the KV cache by step, as engines reported them.

        They are of all tenants and objectives.
        """

        def steps(queries: ApiQueries) -> list[LoadStepResponse]:
            over, step_s = asked.in_steps(
                step, now(), longest_s, lambda age_s: max(queries.grid_s(age_s), MINUTE_LENGTH_S)
            )
            return _load_steps(queries.engine_counts(over, chosen, step_s), over, step_s)

        return ListOf[LoadStepResponse](items=context.read(steps))

    @router.get("/gpu_use")
    def gpu_use(
        asked: LastHour, step: StepText = "1m", agent: Name = None
    ) -> ListOf[GpuStripResponse]:
        """How busy each GPU was by step, from its stored samples, one a minute.

        The newest 20,000 samples of the window are read.
        """

        def strips(queries: ApiQueries) -> list[GpuStripResponse]:
            over, step_s = asked.in_steps(step, now(), longest_s, queries.grid_s)
            found = queries.gpu_use(over.from_s, over.until, agent or None)
            return _strips(found, over, step_s)

        return ListOf[GpuStripResponse](items=context.read(strips))

    return router


def _utc(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def _step_of(over: Window, step_s: int, at: float) -> int:
    return int(over.from_s + max(at - over.from_s, 0.0) // step_s * step_s)


def _phase_series(
    queries: ApiQueries, over: Window, step_s: int, chosen: Selection
) -> PhaseSeriesResponse:
    total = queries.tally(over, chosen).requests
    one_in, found = queries.phases(over, chosen, total)
    by_step: defaultdict[int, list[RequestPhases]] = defaultdict(list)
    for each in found:
        if each is not None:
            by_step[_step_of(over, step_s, each.ended_at)].append(each)
    return PhaseSeriesResponse(
        items=[_phase_step(at, by_step[at]) for at in sorted(by_step)],
        one_in=one_in,
        read=len(found),
        without=sum(each is None for each in found),
    )


def _phase_step(at: int, requests: Sequence[RequestPhases]) -> PhaseStepResponse:
    median, slowest = map(_phases, median_and_slowest(requests))
    return PhaseStepResponse(at=_utc(at), median=median, slowest=slowest)


def _phases(means: PhaseMeans | None) -> PhasesResponse | None:
    return None if means is None else PhasesResponse(**asdict(means))


def _load_steps(rows: Iterable[CountsRow], over: Window, step_s: int) -> list[LoadStepResponse]:
    by_step: defaultdict[int, list[CountsRow]] = defaultdict(list)
    for row in rows:
        by_step[_step_of(over, step_s, row.starts_at)].append(row)
    return [_load_step(at, by_step[at]) for at in sorted(by_step)]


def _load_step(at: int, rows: Sequence[CountsRow]) -> LoadStepResponse:
    found = figures_of_rows(rows, ())
    assert found is not None, "there is a row"
    return LoadStepResponse(
        at=_utc(at),
        running=found.running,
        waiting=found.waiting,
        kv_cache_usage=found.kv_cache_usage,
    )


def _strips(samples: Iterable[GpuUse], over: Window, step_s: int) -> list[GpuStripResponse]:
    by_gpu: defaultdict[tuple[str, int, str, str], dict[int, list[GpuUse]]] = defaultdict(dict)
    for each in samples:
        steps = by_gpu[each.agent, each.index, each.gpu, each.name]
        steps.setdefault(_step_of(over, step_s, each.at), []).append(each)
    return [
        GpuStripResponse(
            gpu=gpu,
            index=index,
            name=name,
            agent=agent,
            items=[GpuStepResponse(at=_utc(at), busy=_busy(steps[at])) for at in sorted(steps)],
        )
        for (agent, index, gpu, name), steps in sorted(by_gpu.items())
    ]


def _busy(samples: Sequence[GpuUse]) -> float | None:
    known = [each.busy for each in samples if each.busy is not None]
    return fsum(known) / len(known) if known else None
