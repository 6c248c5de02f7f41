"""Windows of one engine from what is stored: readings, requests, and the bill."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import fsum
from typing import Any, NamedTuple, Protocol

from agent.analysis.cost.bill import Bill, bill
from agent.analysis.cost.energy import energy_joules
from agent.analysis.cost.shares import window_shares
from agent.analysis.cost.window import WindowCost, window_cost
from agent.analysis.efficiency.activity import RequestKey, activities
from agent.analysis.efficiency.busy import time_parts
from agent.analysis.efficiency.efficiency import Efficiency, efficiency
from agent.analysis.efficiency.intervals import Interval
from agent.analysis.efficiency.load import StepSource, decode_work
from agent.analysis.efficiency.observed import Observed, observe
from agent.analysis.efficiency.phases import Phases
from agent.analysis.efficiency.serving import Serving
from agent.pipeline.deployment import Deployment
from agent.records.engine import EngineSample
from agent.records.gpu import GpuSample
from agent.records.model import Work
from agent.records.request import RequestRecord
from agent.records.window import EngineWindow, RequestPart, StoredRequest

_STEPS = {StepSource.COUNTED: "counted", StepSource.ESTIMATED: "estimated"}


class Store(Protocol):
    """What windows are made of."""

    def readings(self, engine: str, from_at: float, until: float) -> list[EngineSample]:
        """Readings of an engine's page in a time, and the nearest on either side of it."""

    def requests(self, engine: str, from_at: float, until: float) -> list[StoredRequest]:
        """The counted requests that overlap a time."""


class GpuReadings(Protocol):
    """What GPUs told."""

    def __call__(self, gpus: Collection[str], window: Interval, /) -> Sequence[GpuSample]:
        """Readings of these GPUs in a window, and the nearest on either side of it."""


class Edges(NamedTuple):
    """The mark of a window, and from when to when it is."""

    mark: int
    from_at: float
    until: float

    @property
    def interval(self) -> Interval:
        """Without the mark."""
        return Interval(self.from_at, self.until)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Windows in a row, and what each request cost in them.

    `cached_share` is that of all their prompt tokens, as the engine tells it.
    """

    windows: Sequence[EngineWindow]
    costs: Mapping[RequestKey, float]
    serving: Serving
    cached_share: float

    def part(self, request: StoredRequest) -> RequestPart:
        """The request's part of them, and its work as a whole."""
        record = request.record
        prefill, decode = self._works(record)
        return RequestPart(
            row=request.row,
            vantage=record.vantage.value,
            whole=record.ended_at < self.windows[-1].until,
            cost_usd=self.costs.get((record.trace_id, record.span_id)),
            prefill_flops=None if prefill is None else prefill.flops,
            prefill_kv_bytes=None if prefill is None else prefill.bytes_moved,
            decode_flops=None if decode is None else decode.flops,
            decode_kv_bytes=None if decode is None else decode.bytes_moved,
        )

    def _works(self, record: RequestRecord) -> tuple[Work | None, Work | None]:
        """Prefill and decode; None where the model is unknown, or nothing shows work."""
        active = activities([record], self.cached_share)
        if self.serving.model is None or not active:
            return None, None
        (activity,) = active
        return (
            self.serving.prefill(activity.computed_tokens, activity.cached_tokens),
            decode_work(activity, self.serving),
        )


class WindowCounter:
    """Counts windows of one engine; the same stored rows give the same windows."""

    def __init__(
        self, engine: Deployment, store: Store, gpu_readings: GpuReadings, max_gap_s: float
    ) -> None:
        self._engine = engine
        self._store = store
        self._gpu_readings = gpu_readings
        self._max_gap_s = max_gap_s

    def count(
        self,
        edges: Sequence[Edges],
        kept: Mapping[int, EngineWindow],
        in_time: Callable[[StoredRequest], bool],
    ) -> Counted:
        """The windows; the bill of one that was `kept`, by its mark, stays what it is.

        A request that did not come `in_time` has no part of any.
        """
        name = self._engine.engine
        reach = Interval(edges[0].from_at, edges[-1].until)
        readings = self._store.readings(name, *reach)
        rows = list(filter(in_time, self._store.requests(name, *reach)))
        gpus = self._engine.gpus()
        whole = observe(readings, reach, max_gap_s=self._max_gap_s)
        serving = self._engine.serving(gpus, whole.ranks)
        costs: defaultdict[RequestKey, list[float]] = defaultdict(list)
        windows = []
        for each in edges:
            window = _Window(self._engine, serving, gpus, each, _model_in(readings, each))
            observed = observe(readings, each.interval, max_gap_s=self._max_gap_s)
            told = self._gpu_readings([gpu.gpu for gpu in gpus], each.interval)
            inside = _overlapping(rows, each)
            counted, cost = window.count(observed, inside, told, kept.get(each.mark))
            windows.append(counted)
            for key, usd in ({} if cost is None else cost.requests).items():
                costs[key].append(usd)
        return Counted(
            windows=windows,
            costs={key: fsum(parts) for key, parts in costs.items()},
            serving=serving,
            cached_share=whole.growth.cached_share,
        )


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
        engine: Deployment,
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
        observed: Observed,
        rows: Sequence[StoredRequest],
        gpu_samples: Sequence[GpuSample],
        before: EngineWindow | None,
    ) -> tuple[EngineWindow, WindowCost | None]:
        """The window, and what each request cost in it."""
        records = [row.record for row in rows]
        active = activities(records, observed.growth.cached_share)
        shares = window_shares(observed, records, self._serving)
        found = efficiency(observed, records, self._serving, gpu_samples)
        joules, billed = self._billed(gpu_samples, before)
        cost = window_cost(None if billed is None else billed.usd, shares)
        ended = [row for row in rows if self._ends_here(row)]
        window = EngineWindow(
            engine=self._engine.engine,
            model=self._model,
            starts_at=self._edges.mark,
            from_at=self._edges.from_at,
            until=self._edges.until,
            gpus=self._gpu_count(before),
            requests=len(ended),
            **time_parts(observed, active)._asdict(),
            computed_tokens=shares.computed_tokens,
            cached_tokens=shares.cached_tokens,
            output_tokens=shares.output_tokens,
            good_tokens=fsum(row.record.output_tokens or 0 for row in ended if row.met),
            cache_full=observed.cache_full,
            method=shares.method.value,
            joules=joules,
            peak_flops_per_s=self._serving.peak_flops_per_s,
            peak_bytes_per_s=self._serving.bandwidth_bytes_per_s,
            **_work(found.phases),
            **_views(found, before),
            **_dollars(billed, cost),
        )
        return window, cost

    def _ends_here(self, row: StoredRequest) -> bool:
        return self._edges.from_at <= row.record.ended_at < self._edges.until

    def _gpu_count(self, before: EngineWindow | None) -> int | None:
        if before is not None:
            return before.gpus
        return len(self._engine.billed_gpus(self._gpus)) or None

    def _billed(
        self, gpu_samples: Sequence[GpuSample], before: EngineWindow | None
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


def _work(phases: Phases | None) -> dict[str, Any]:
    """Work and seconds by phase; nothing where the model is not known."""
    if phases is None:
        return {}
    return {
        "steps": _STEPS[phases.steps],
        "prefill_s": phases.prefill_s,
        "prefill_flops": phases.prefill_work.flops,
        "prefill_bytes": phases.prefill_work.bytes_moved,
        "decode_s": phases.decode_s,
        "decode_flops": phases.decode_work.flops,
        "decode_bytes": phases.decode_work.bytes_moved,
    }


def _views(found: Efficiency, before: EngineWindow | None) -> dict[str, Any]:
    """What the engine and the GPUs say; of GPUs, few readings outlast some minutes."""
    hardware = (found.hardware.mfu, found.hardware.mbu)
    if before is not None:
        hardware = (before.hardware_mfu, before.hardware_mbu)
    return {
        "engine_mfu": found.engine.mfu,
        "engine_mbu": found.engine.mbu,
        "hardware_mfu": hardware[0],
        "hardware_mbu": hardware[1],
        "disagreements": tuple(asdict(each) for each in found.disagreements),
    }


def _dollars(billed: Bill | None, cost: WindowCost | None) -> dict[str, Any]:
    if billed is None or cost is None:
        return {}
    return {
        "gpus_usd": billed.gpus_usd,
        "electricity_usd": billed.electricity_usd,
        "idle_usd": cost.idle,
        "unknown_usd": cost.unknown,
        "unseen_usd": cost.unseen,
        "aborted_usd": cost.aborted,
        "aborted_prefill_usd": cost.aborted_prefill,
        "computed_usd": cost.computed,
        "cached_usd": cost.cached,
        "decode_usd": cost.decode,
    }
