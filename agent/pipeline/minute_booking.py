"""Windows of one engine from what is stored: readings, requests, and the bill."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import NamedTuple, Protocol

from agent.analysis.cost.bill import Bill, bill, gpu_hours
from agent.analysis.cost.energy import energy_joules
from agent.analysis.cost.minute_cost import MinuteCost, minute_cost
from agent.analysis.cost.shares import minute_shares
from agent.analysis.efficiency.busy_time import time_parts
from agent.analysis.efficiency.minute_efficiency import minute_efficiency
from agent.analysis.efficiency.observation import Observation, observe
from agent.analysis.efficiency.request_activity import RequestKey, request_activities
from agent.analysis.efficiency.serving import Serving
from agent.analysis.efficiency.time_range import TimeRange
from agent.analysis.efficiency.work import decode_work, prefill_work
from agent.pipeline.deployment import EngineDeployment
from agent.pipeline.minute_columns import (
    counted_columns,
    dollar_columns,
    view_columns,
    work_columns,
)
from agent.records.engine import EngineSample
from agent.records.gpu import GpuSample
from agent.records.minute import MinuteRow, RequestCost, StoredRequest
from agent.records.model import Work
from agent.records.request import RequestRecord


class Store(Protocol):
    """What windows are made of."""

    def readings(self, engine: str, from_at: float, until: float) -> list[EngineSample]:
        """Readings of an engine's page in a time, and the nearest on either side of it."""

    def requests(self, engine: str, from_at: float, until: float) -> list[StoredRequest]:
        """The counted requests that overlap a time."""


class GpuReadings(Protocol):
    """What GPUs told."""

    def __call__(self, gpus: Collection[str], window: TimeRange, /) -> Sequence[GpuSample]:
        """Readings of these GPUs in a window, and the nearest on either side of it."""


class Edges(NamedTuple):
    """The mark of a window, and from when to when it is."""

    mark: int
    from_at: float
    until: float

    @property
    def interval(self) -> TimeRange:
        """Without the mark."""
        return TimeRange(self.from_at, self.until)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Windows in a row, and what each request cost in them, in dollars and in hours of one GPU.

    `cached_share` is that of all their prompt tokens, as the engine tells it.
    """

    windows: Sequence[MinuteRow]
    costs: Mapping[RequestKey, float]
    gpu_hours: Mapping[RequestKey, float]
    serving: Serving
    cached_share: float

    def part(self, request: StoredRequest) -> RequestCost:
        """The request's part of them, and its work as a whole."""
        record = request.record
        prefill, decode = self._works(record)
        key = (record.trace_id, record.span_id)
        return RequestCost(
            row=request.row,
            vantage=record.vantage.value,
            whole=record.ended_at < self.windows[-1].until,
            cost_usd=self.costs.get(key),
            gpu_hours=self.gpu_hours.get(key),
            prefill_flops=None if prefill is None else prefill.flops,
            prefill_kv_bytes=None if prefill is None else prefill.bytes_moved,
            decode_flops=None if decode is None else decode.flops,
            decode_kv_bytes=None if decode is None else decode.bytes_moved,
        )

    def _works(self, record: RequestRecord) -> tuple[Work | None, Work | None]:
        """Prefill and decode, of which an engine of one phase does none of the other.

        None where the model is unknown, or nothing shows work.
        """
        active = request_activities([record], self.cached_share)
        if self.serving.model is None or not active:
            return None, None
        (activity,) = active
        return (
            prefill_work(activity, self.serving),
            decode_work(activity, self.serving),
        )


class MinuteBooker:
    """Counts windows of one engine; the same stored rows give the same windows."""

    def __init__(
        self, engine: EngineDeployment, store: Store, gpu_readings: GpuReadings, max_gap_s: float
    ) -> None:
        self._engine = engine
        self._store = store
        self._gpu_readings = gpu_readings
        self._max_gap_s = max_gap_s

    def count(
        self,
        edges: Sequence[Edges],
        kept: Mapping[int, MinuteRow],
        in_time: Callable[[StoredRequest], bool],
    ) -> Counted:
        """The windows; the bill of one that was `kept`, by its mark, stays what it is.

        A request that did not come `in_time` has no part of any.
        """
        name = self._engine.engine
        reach = TimeRange(edges[0].from_at, edges[-1].until)
        readings = self._store.readings(name, *reach)
        rows = list(filter(in_time, self._store.requests(name, *reach)))
        gpus = self._engine.gpus()
        whole = observe(readings, reach, max_gap_s=self._max_gap_s)
        serving = self._engine.serving(gpus, whole.ranks, readings)
        counted: list[_Counted] = []
        for each in edges:
            window = _Window(self._engine, serving, gpus, each, _model_in(readings, each))
            observed = observe(readings, each.interval, max_gap_s=self._max_gap_s)
            told = self._gpu_readings([gpu.gpu for gpu in gpus], each.interval)
            inside = _overlapping(rows, each)
            counted.append(window.count(observed, inside, told, kept.get(each.mark)))
        return Counted(
            windows=[each.window for each in counted],
            costs=_by_request(each.cost for each in counted),
            gpu_hours=_by_request(each.gpu_hours for each in counted),
            serving=serving,
            cached_share=whole.growth.cached_share,
        )


class _Counted(NamedTuple):
    """A window, and its cost in dollars and in hours of one GPU; None where that is unknown."""

    window: MinuteRow
    cost: MinuteCost | None
    gpu_hours: MinuteCost | None


def _by_request(costs: Iterable[MinuteCost | None]) -> dict[RequestKey, float]:
    """What each request cost in all windows that have a cost."""
    parts: defaultdict[RequestKey, list[float]] = defaultdict(list)
    for cost in costs:
        for key, part in ({} if cost is None else cost.requests).items():
            parts[key].append(part)
    return {key: fsum(each) for key, each in parts.items()}


def _good_tokens(ended: Iterable[StoredRequest]) -> dict[str, float]:
    """The output tokens of the requests that met each objective."""
    tokens: defaultdict[str, float] = defaultdict(float)
    for row in ended:
        for objective in row.met_objectives:
            tokens[objective] += row.record.output_tokens or 0
    return dict(tokens)


def _model_in(readings: Sequence[EngineSample], edges: Edges) -> str | None:
    """The model that was served: the last told before the window's end, else the first after it."""
    told = [(sample.at, sample.model) for sample in readings if sample.model is not None]
    before = [model for at, model in told if at < edges.until]
    return before[-1] if before else next((model for _, model in told), None)


def _overlapping(rows: Sequence[StoredRequest], edges: Edges) -> list[StoredRequest]:
    return [
        row
        for row in rows
        if row.record.started_at <= edges.until
        and edges.from_at <= row.record.ended_at
        and row.from_at <= edges.until
    ]


class _Window:
    """One window, of which the GPUs are known."""

    def __init__(
        self,
        engine: EngineDeployment,
        serving: Serving,
        gpus: Sequence[GpuSample],
        edges: Edges,
        model: str | None,
    ) -> None:
        self._model = model
        self._engine = engine
        self._serving = serving
        self._gpus = gpus
        self._edges = edges

    def count(
        self,
        observed: Observation,
        rows: Sequence[StoredRequest],
        gpu_samples: Sequence[GpuSample],
        before: MinuteRow | None,
    ) -> _Counted:
        """The window, and what each request cost in it."""
        records = [row.record for row in rows]
        parts = time_parts(observed, request_activities(records, observed.growth.cached_share))
        shares = minute_shares(observed, records, self._serving)
        found = minute_efficiency(observed, records, self._serving, gpu_samples)
        joules, billed = self._billed(gpu_samples, before)
        cost = minute_cost(None if billed is None else billed.usd, shares)
        ended = [row for row in rows if self._ends_here(row)]
        window = MinuteRow(
            engine=self._engine.engine,
            model=self._model,
            starts_at=self._edges.mark,
            from_at=self._edges.from_at,
            until=self._edges.until,
            gpus=self._gpu_count(before),
            requests=len(request_activities(row.record for row in ended)),
            **parts._asdict(),
            computed_tokens=shares.computed_tokens,
            cached_tokens=shares.cached_tokens,
            output_tokens=shares.output_tokens,
            good_tokens=fsum(row.record.output_tokens or 0 for row in ended if row.met),
            good_tokens_by_objective=_good_tokens(ended),
            **counted_columns(observed, parts.busy_s, shares.output_tokens),
            method=shares.method.value,
            joules=joules,
            peak_flops_per_s=self._serving.peak_flops_per_s,
            peak_bytes_per_s=self._serving.bandwidth_bytes_per_s,
            **work_columns(found.phases),
            **view_columns(found, before),
            **dollar_columns(billed, cost),
        )
        hours = None if window.gpus is None else gpu_hours(window.gpus, self._edges.interval)
        return _Counted(window, cost, minute_cost(hours, shares))

    def _ends_here(self, row: StoredRequest) -> bool:
        return self._edges.from_at <= row.record.ended_at < self._edges.until

    def _gpu_count(self, before: MinuteRow | None) -> int | None:
        if before is not None:
            return before.gpus
        return len(self._engine.billed_gpus(self._gpus)) or None

    def _billed(
        self, gpu_samples: Sequence[GpuSample], before: MinuteRow | None
    ) -> tuple[float | None, Bill | None]:
        """Joules and dollars. What was billed once stays: only whose it was may change."""
        if before is not None:
            usd = before.gpus_usd
            kept = (
                None if usd is None else Bill(gpus_usd=usd, electricity_usd=before.electricity_usd)
            )
            return before.joules, kept
        window = self._edges.interval
        joules = energy_joules(gpu_samples, [gpu.gpu for gpu in self._gpus], window)
        return joules, bill(
            self._engine.prices,
            window,
            engine=self._engine.engine,
            gpus=self._engine.billed_gpus(self._gpus),
            joules=joules,
        )
