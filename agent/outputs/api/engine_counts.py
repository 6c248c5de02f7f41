"""What engines counted themselves in a window, in responses about requests."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import Field

from agent.analysis.engine_figures import (
    AttainmentBounds,
    EngineFigures,
    LatencyBounds,
    figures_of_rows,
)
from agent.analysis.savings import Drafting, Offload, savings_by_engine
from agent.outputs.api.api_context import ApiQueries
from agent.outputs.api.base_responses import BaseResponse
from agent.records.engine_counts import CountsRow
from agent.records.objective import Objective, objectives_by_agent
from agent.records.queries import Selection, Window


class BoundsResponse(BaseResponse):
    """Between which values the true one lies, as far as buckets say."""

    lower: float
    upper: float | None = Field(description="null if it lies above the highest bound")
    estimate: float | None = Field(
        description="interpolated inside the bucket, as Prometheus' histogram_quantile does"
    )


class EngineLatencyResponse(BaseResponse):
    """A latency by an engine's histogram, in milliseconds."""

    source: Literal["engine_histogram"] = "engine_histogram"
    count: float = Field(description="measurements in the window")
    mean: float
    p50: BoundsResponse
    p95: BoundsResponse
    p99: BoundsResponse


class AttainmentBoundsResponse(BaseResponse):
    """Between which shares the attainment of an objective lies."""

    objective: str
    lower: float
    upper: float


class SavingsResponse(BaseResponse):
    """Whether caches outside an engine's GPU and its drafts pay; both verdicts are estimates."""

    agent: str
    engine: str
    offload: Offload | None = Field(description="null if nothing was looked up outside the GPU")
    speculation: Drafting | None = Field(description="null if nothing was drafted")


class EngineCountsResponse(BaseResponse):
    """What engines counted themselves, rows or not. Null is what no engine counts.

    Rates are per second, gauges means over time. Percentiles are of requests that had their first
    token or ended in the window.
    """

    counted_from: datetime = Field(description="the window in whole minutes")
    counted_until: datetime = Field(description="the newest sample in it")
    covered_s: float = Field(description="seconds in which any engine was seen")
    requests: float | None = Field(description="ended, whatever their outcome")
    completed: float | None
    failed: float | None = Field(description="by the engine's finish reasons and statuses")
    aborted: float | None
    throughput_rps: float | None = Field(description="completed requests per second")
    input_tokens_per_s: float | None
    output_tokens_per_s: float | None
    cached_ratio: float | None = Field(description="prompt tokens that a cache served / all")
    preemptions: float | None
    running: float | None
    waiting: float | None
    kv_cache_usage: float | None = Field(description="mean of the fullest engine, 0 to 1")
    kv_cache_usage_max: float | None
    batch_fill: float | None = Field(description="running requests / the most that may run")
    latencies_ms: Mapping[str, EngineLatencyResponse] = Field(
        description="ttft, tpot, itl, e2e, queue, prefill, decode; without those not measured"
    )
    attainment: list[AttainmentBoundsResponse] = Field(
        description="of objectives for all requests of a model; no overlap of limits is assumed"
    )
    goodput_rps: BoundsResponse | None = Field(
        description="null unless one objective covers all these engines"
    )
    savings: list[SavingsResponse] = Field(
        description="of the engines that load KV values from outside their GPUs, or draft"
    )
    rows_ratio: float | None = Field(
        description="requests with a row / requests that the engines counted, at most 1"
    )


def engine_counts_of(
    queries: ApiQueries, over: Window, chosen: Selection
) -> EngineCountsResponse | None:
    """What engines counted in a window; None without any, and for one tenant or objective."""
    if chosen.tenant is not None or chosen.objective is not None:
        return None
    rows = queries.engine_counts(over, chosen)
    if not rows:
        return None
    whole = Window(from_s=int(over.from_s // 60) * 60, until=over.until, ends_now=over.ends_now)
    return _response(rows, _objectives(queries, chosen), queries.tally(whole, chosen).requests)


def engine_counts_by_step(
    queries: ApiQueries, over: Window, step_s: int, chosen: Selection
) -> Mapping[int, EngineCountsResponse]:
    """The same by the start of each step of whole minutes; empty for shorter steps."""
    if chosen.tenant is not None or chosen.objective is not None or step_s % 60:
        return {}
    by_step: defaultdict[int, list[CountsRow]] = defaultdict(list)
    for row in queries.engine_counts(over, chosen, step_s):
        since = max(row.starts_at - over.from_s, 0)
        by_step[int(over.from_s + since // step_s * step_s)].append(row)
    objectives = _objectives(queries, chosen)
    return {start: _response(rows, objectives, None) for start, rows in by_step.items()}


def _objectives(queries: ApiQueries, chosen: Selection) -> list[tuple[str, Objective]]:
    found = objectives_by_agent(queries.objectives_in_force())
    return [(agent, each) for agent, each in found if chosen.agent in (None, agent)]


def _response(
    rows: Sequence[CountsRow], objectives: Sequence[tuple[str, Objective]], with_rows: int | None
) -> EngineCountsResponse:
    found = figures_of_rows(rows, objectives)
    assert found is not None
    return EngineCountsResponse(
        **_figures(found),
        counted_from=datetime.fromtimestamp(min(row.starts_at for row in rows), UTC),
        counted_until=datetime.fromtimestamp(max(row.until for row in rows), UTC),
        savings=[SavingsResponse(**each._asdict()) for each in savings_by_engine(rows)],
        rows_ratio=min(with_rows / found.requests, 1.0)
        if with_rows is not None and found.requests
        else None,
    )


def _figures(found: EngineFigures) -> dict[str, Any]:
    values = {name: getattr(found, name) for name in EngineFigures.__slots__}
    values["latencies_ms"] = {
        name: _latency(each) for name, each in values.pop("latencies").items()
    }
    values["attainment"] = [_attained(each) for each in found.attainment]
    if found.goodput_rps is not None:
        values["goodput_rps"] = BoundsResponse(**found.goodput_rps._asdict())
    return values


def _latency(found: LatencyBounds) -> EngineLatencyResponse:
    p50, p95, p99 = (BoundsResponse(**each._asdict()) for each in found.quantiles_ms.values())
    return EngineLatencyResponse(count=found.count, mean=found.mean_ms, p50=p50, p95=p95, p99=p99)


def _attained(found: AttainmentBounds) -> AttainmentBoundsResponse:
    return AttainmentBoundsResponse(**asdict(found))
