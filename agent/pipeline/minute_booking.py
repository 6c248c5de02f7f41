"""Books minutes of one engine from stored samples and requests, and splits their bills."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import fsum
from typing import Any, NamedTuple

from agent.analysis.cost.bill import Bill, bill, gpu_hours
from agent.analysis.cost.energy import energy_joules
from agent.analysis.cost.minute_cost import MinuteCost, minute_cost
from agent.analysis.efficiency.engine_observation import (
    LONGEST_READ_S,
    EngineObservation,
    observe,
)
from agent.analysis.efficiency.minute_efficiency import MinuteEfficiency, minute_efficiency
from agent.analysis.efficiency.request_activity import RequestKey, request_activities
from agent.analysis.efficiency.serving import Serving
from agent.analysis.efficiency.time_range import TimeRange
from agent.analysis.efficiency.work import decode_work, prefill_work
from agent.analysis.ledger import minute_ledger, unmatched_requests
from agent.pipeline.deployment import EngineDeployment
from agent.records.engine import EngineSample
from agent.records.gpu import GpuSample
from agent.records.minute import MinuteRow, RequestCost, StoredRequest
from agent.records.model import Work
from agent.records.request import RequestRecord
from agent.store.minutes import MinuteStore

# The samples of these GPUs (UUIDs) in a time, the nearest on either side, and recent others.
GpuSamplesOf = Callable[[Collection[str], TimeRange], Sequence[GpuSample]]


class MinuteBounds(NamedTuple):
    """When a minute was due, and its ends, in Unix seconds."""

    starts_at: int
    from_at: float
    until: float

    @property
    def time(self) -> TimeRange:
        """From end to end."""
        return TimeRange(self.from_at, self.until)


@dataclass(frozen=True, slots=True, kw_only=True)
class BookedMinutes:
    """Consecutive minutes, and what each request cost in them in dollars and in GPU-hours.

    `cached_share` is the engine's share of cached prompt tokens in all of them.
    """

    minutes: Sequence[MinuteRow]
    costs: Mapping[RequestKey, float]
    gpu_hours: Mapping[RequestKey, float]
    serving: Serving
    cached_share: float

    def cost_of(self, request: StoredRequest) -> RequestCost:
        """The request's cost in these minutes, and its whole work."""
        record = request.record
        prefill, decode = self._work_of(record)
        key = (record.trace_id, record.span_id)
        return RequestCost(
            row=request.row,
            vantage=record.vantage.value,
            complete=record.ended_at < self.minutes[-1].until,
            cost_usd=self.costs.get(key),
            gpu_hours=self.gpu_hours.get(key),
            prefill_flops=None if prefill is None else prefill.flops,
            prefill_kv_bytes=None if prefill is None else prefill.bytes_moved,
            decode_flops=None if decode is None else decode.flops,
            decode_kv_bytes=None if decode is None else decode.bytes_moved,
        )

    def _work_of(self, record: RequestRecord) -> tuple[Work | None, Work | None]:
        """Prefill and decode; None where the model is unknown or nothing shows work."""
        active = request_activities([record], self.cached_share)
        if self.serving.model is None or not active:
            return None, None
        (activity,) = active
        return prefill_work(activity, self.serving), decode_work(activity, self.serving)


class MinuteBooker:
    """Books minutes of one engine. The same stored rows give the same minutes."""

    def __init__(
        self,
        deployment: EngineDeployment,
        store: MinuteStore,
        gpu_samples: GpuSamplesOf,
        max_gap_s: float,
    ) -> None:
        self._deployment = deployment
        self._store = store
        self._gpu_samples = gpu_samples
        self._max_gap_s = max_gap_s

    def book(
        self,
        bounds: Sequence[MinuteBounds],
        before: Mapping[int, MinuteRow],
        in_time: Callable[[StoredRequest], bool],
    ) -> BookedMinutes:
        """Book consecutive minutes.

        `before` has the minutes that were booked earlier, by `starts_at`: their bills stay.
        Requests that are not `in_time` have no share of any minute.
        """
        engine = self._deployment.engine
        time = TimeRange(bounds[0].from_at, bounds[-1].until)
        samples = self._store.samples(engine, *time)
        # The last sample may show requests that began while it was read.
        stored = self._store.requests(engine, time.from_at, time.until + LONGEST_READ_S)
        rows = list(filter(in_time, stored))
        gpus = self._deployment.gpus()
        whole = observe(samples, time, max_gap_s=self._max_gap_s)
        serving = self._deployment.serving(gpus, whole.ranks, samples)
        booked: list[_BookedMinute] = []
        for each in bounds:
            minute = _Minute(self._deployment, serving, gpus, each, _model_in(samples, each))
            observed = observe(samples, each.time, max_gap_s=self._max_gap_s)
            of_gpus = self._gpu_samples([gpu.gpu for gpu in gpus], each.time)
            inside = _overlapping(rows, each)
            found = minute.book(observed, inside, of_gpus, before.get(each.starts_at))
            unmatched = unmatched_requests(observed, samples, [row.record for row in inside])
            booked.append(found._replace(minute=replace(found.minute, unmatched=unmatched)))
        return BookedMinutes(
            minutes=[each.minute for each in booked],
            costs=_by_request(each.cost for each in booked),
            gpu_hours=_by_request(each.gpu_hours for each in booked),
            serving=serving,
            cached_share=whole.growth.cached_share,
        )


class _BookedMinute(NamedTuple):
    """A minute, and its cost in dollars and in GPU-hours; None where that is unknown."""

    minute: MinuteRow
    cost: MinuteCost | None
    gpu_hours: MinuteCost | None


def _by_request(costs: Iterable[MinuteCost | None]) -> dict[RequestKey, float]:
    """What each request cost in all minutes with a known cost."""
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


def _model_in(samples: Sequence[EngineSample], bounds: MinuteBounds) -> str | None:
    """The last model that samples name before the minute's end, else the first after it."""
    named = [(sample.at, sample.model) for sample in samples if sample.model is not None]
    before = [model for at, model in named if at < bounds.until]
    return before[-1] if before else next((model for _, model in named), None)


def _ratios(found: MinuteEfficiency, before: MinuteRow | None) -> dict[str, Any]:
    """MFU and MBU by the engine and by the hardware.

    A minute that is booked again keeps the hardware's: most GPU samples live only some minutes.
    """
    mfu, mbu = found.hardware.mfu, found.hardware.mbu
    if before is not None:
        mfu, mbu = before.hardware_mfu, before.hardware_mbu
    engine = {"engine_mfu": found.engine.mfu, "engine_mbu": found.engine.mbu}
    return {**engine, "hardware_mfu": mfu, "hardware_mbu": mbu}


def _overlapping(rows: Sequence[StoredRequest], bounds: MinuteBounds) -> list[StoredRequest]:
    return [
        row
        for row in rows
        if row.from_at <= bounds.until + LONGEST_READ_S and bounds.from_at <= row.record.ended_at
    ]


class _Minute:
    """One minute on known GPUs."""

    def __init__(
        self,
        deployment: EngineDeployment,
        serving: Serving,
        gpus: Sequence[GpuSample],
        bounds: MinuteBounds,
        model: str | None,
    ) -> None:
        self._deployment = deployment
        self._serving = serving
        self._gpus = gpus
        self._bounds = bounds
        self._model = model

    def book(
        self,
        observed: EngineObservation,
        rows: Sequence[StoredRequest],
        gpu_samples: Sequence[GpuSample],
        before: MinuteRow | None,
    ) -> _BookedMinute:
        """The minute, and what each request cost in it."""
        records = [row.record for row in rows]
        split = minute_cost(observed, records, self._serving)
        found = minute_efficiency(observed, records, self._serving, gpu_samples)
        joules, billed = self._billed(gpu_samples, before)
        usd = None if billed is None else split.times(billed.usd)
        ended = [row for row in rows if self._ends_here(row)]
        minute = MinuteRow(
            engine=self._deployment.engine,
            model=self._model,
            **self._bounds._asdict(),
            gpus=self._gpu_count(before),
            requests=len(request_activities(row.record for row in ended)),
            good_tokens=fsum(row.record.output_tokens or 0 for row in ended if row.met),
            good_tokens_by_objective=_good_tokens(ended),
            method=split.method.value,
            work=found.work,
            cost=None if usd is None else usd.cost,
            steps=None if found.steps is None else found.steps.value,
            joules=joules,
            gpus_usd=None if billed is None else billed.gpus_usd,
            electricity_usd=None if billed is None else billed.electricity_usd,
            peak_flops_per_s=self._serving.peak_flops_per_s,
            peak_bytes_per_s=self._serving.bandwidth_bytes_per_s,
            **_ratios(found, before),
            disagreements=tuple(asdict(each) for each in found.disagreements),
            ledger=minute_ledger(observed, records),
            ledger_closed=before is not None and bool(before.ledger_closed),
        )
        gpus, time = minute.gpus, self._bounds.time
        hours = None if gpus is None else split.times(gpu_hours(gpus, time))
        return _BookedMinute(minute, usd, hours)

    def _ends_here(self, row: StoredRequest) -> bool:
        return self._bounds.from_at <= row.record.ended_at < self._bounds.until

    def _gpu_count(self, before: MinuteRow | None) -> int | None:
        if before is not None:
            return before.gpus
        return len(self._deployment.billed_gpus(self._gpus)) or None

    def _billed(
        self, gpu_samples: Sequence[GpuSample], before: MinuteRow | None
    ) -> tuple[float | None, Bill | None]:
        """Joules and dollars. A bill stays as it was first booked; only its shares change."""
        if before is not None:
            usd, electricity = before.gpus_usd, before.electricity_usd
            same = None if usd is None else Bill(gpus_usd=usd, electricity_usd=electricity)
            return before.joules, same
        time = self._bounds.time
        joules = energy_joules(gpu_samples, [gpu.gpu for gpu in self._gpus], time)
        return joules, bill(
            self._deployment.prices,
            time,
            engine=self._deployment.engine,
            gpus=self._deployment.billed_gpus(self._gpus),
            joules=joules,
        )
