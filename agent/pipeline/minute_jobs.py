"""The job of each minute: computes an engine's new minutes, and older ones again for late rows."""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent.analysis.cost.bill import Bill, bill, energy_joules, gpu_hours
from agent.analysis.cost.minute_cost import MinuteCost, minute_cost
from agent.analysis.efficiency.engine_observation import (
    LONGEST_READ_S,
    EngineObservation,
    minute_start_near,
    observe,
)
from agent.analysis.efficiency.minute_efficiency import MinuteEfficiency, minute_efficiency
from agent.analysis.efficiency.request_activity import (
    TimeRange,
    TimeRanges,
    merged,
    request_activities,
    worked_on,
)
from agent.analysis.efficiency.work import Serving, decode_work, prefill_work, whole_works
from agent.analysis.ledger import (
    LONGEST_OPEN_S,
    ledgers_to_close,
    minute_ledger,
    unmatched_requests,
)
from agent.catalog.reasons import StoreWrite
from agent.errors import StoreUnavailable
from agent.pipeline.deployment import EngineDeployment
from agent.records.columns import VANTAGES, Array, Mask, MinuteRequests
from agent.records.engine import EngineSample
from agent.records.gpu import GpuSample
from agent.records.minute import LONGEST_REQUEST_S, MINUTE_LENGTH_S, MinuteRow, RequestCost
from agent.store.minutes import MinuteStore

_AT_ONCE = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComputedMinutes:
    """Consecutive minutes, and what each request cost in them in dollars and in GPU-hours.

    Costs are NaN if no minute knows them. `cached_share` is the engine's share of cached prompt
    tokens in all of them.
    """

    minutes: Sequence[MinuteRow]
    requests: MinuteRequests
    usd: Array
    gpu_hours: Array
    serving: Serving
    cached_share: float

    def costs_in(self, time: TimeRange) -> Iterator[RequestCost]:
        """The costs of the requests that overlap a time, in these minutes, and their whole work."""
        ended_at = self.requests.ended_at
        overlap = (self.requests.started_at <= time.until) & (ended_at >= time.from_at)
        indexes = np.flatnonzero(overlap & (ended_at < time.until + LONGEST_REQUEST_S))
        requests = self.requests.chosen(indexes)
        columns = (
            requests.rows,
            np.array([vantage.value for vantage in VANTAGES])[requests.vantages],
            requests.ended_at < self.minutes[-1].until,
            *(self.usd[indexes], self.gpu_hours[indexes], *self._works(requests)),
        )
        return _costs(columns)

    def _works(self, requests: MinuteRequests) -> Iterator[Array]:
        active = request_activities(requests, self.cached_share)
        for work_of in (prefill_work, decode_work):
            work = work_of(active, self.serving)
            for values in (work.flops, work.kv_bytes):
                found = np.full(requests.rows.size, np.nan)
                if self.serving.model is not None:
                    found[requests.indices_of(active.rows)] = values
                yield found


def _costs(columns: Sequence[NDArray[Any]]) -> Iterator[RequestCost]:
    """One for each row of the columns, made when it is written: all at once take much memory."""
    for first in range(0, columns[0].size, _AT_ONCE):
        yield from map(RequestCost, *[_values(each[first : first + _AT_ONCE]) for each in columns])


def _values(column: NDArray[Any]) -> list[Any]:
    """The values of a column; None if one is unknown."""
    values: list[Any] = column.tolist()
    return [None if value != value else value for value in values]


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


class MinuteCalculator:
    """Computes minutes of one engine. The same stored rows give the same minutes."""

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

    def compute(
        self,
        bounds: Sequence[MinuteBounds],
        before: Mapping[int, MinuteRow],
        in_time: Callable[[MinuteRequests], Mask],
    ) -> ComputedMinutes:
        """Compute consecutive minutes.

        `before` has the minutes that were computed earlier, by `starts_at`: their bills stay.
        Requests that are not `in_time` have no share of any minute.
        """
        time = TimeRange(bounds[0].from_at, bounds[-1].until)
        samples = self._store.samples(self._deployment.engine, *time)
        requests = self._requests(time, in_time)
        gpus = self._deployment.gpus()
        whole = observe(samples, time, max_gap_s=self._max_gap_s)
        serving = self._deployment.serving(gpus, whole.ranks, samples)
        computed: list[_ComputedMinute] = []
        for each in bounds:
            minute = _Minute(self._deployment, serving, gpus, each, _model_in(samples, each))
            observed = observe(samples, each.time, max_gap_s=self._max_gap_s)
            of_gpus = self._gpu_samples([gpu.gpu for gpu in gpus], each.time)
            inside = requests.chosen(_overlapping(requests, each))
            found = minute.compute(observed, inside, of_gpus, before.get(each.starts_at))
            unmatched = unmatched_requests(observed, samples, inside)
            computed.append(found._replace(minute=replace(found.minute, unmatched=unmatched)))
        return ComputedMinutes(
            minutes=[each.minute for each in computed],
            requests=requests,
            usd=_sums(requests, [each.cost for each in computed]),
            gpu_hours=_sums(requests, [each.gpu_hours for each in computed]),
            serving=serving,
            cached_share=whole.increase.cached_share,
        )

    def _requests(
        self, time: TimeRange, in_time: Callable[[MinuteRequests], Mask]
    ) -> MinuteRequests:
        # The last sample may show requests that began while it was read.
        until = time.until + LONGEST_READ_S
        stored = self._store.requests(self._deployment.engine, time.from_at, until)
        return stored.chosen(in_time(stored))


class _ComputedMinute(NamedTuple):
    """A minute, and its cost in dollars and in GPU-hours; None if that is unknown."""

    minute: MinuteRow
    cost: MinuteCost | None
    gpu_hours: MinuteCost | None


def _sums(requests: MinuteRequests, costs: Iterable[MinuteCost | None]) -> Array:
    """What each request cost in all minutes with a known cost; NaN if none has a part of it."""
    sums = np.full(requests.rows.size, np.nan)
    for cost in costs:
        if cost is not None:
            indexes = requests.indices_of(cost.rows)
            sums[indexes] = np.nan_to_num(sums[indexes]) + cost.parts
    return sums


def _good_tokens(ended: MinuteRequests) -> dict[str, float]:
    """The output tokens of the requests that met each objective."""
    tokens: defaultdict[str, float] = defaultdict(float)
    for index, objectives in enumerate(ended.met_objectives):
        judged = ended.verdicts == index
        for objective in objectives if judged.any() else ():
            tokens[objective] += float(np.nansum(ended.output_tokens[judged]))
    return dict(tokens)


def _model_in(samples: Sequence[EngineSample], bounds: MinuteBounds) -> str | None:
    """The last model that samples name before the minute's end, else the first after it."""
    named = [(sample.at, sample.model) for sample in samples if sample.model is not None]
    before = [model for at, model in named if at < bounds.until]
    return before[-1] if before else next((model for _, model in named), None)


def _ratios(found: MinuteEfficiency, before: MinuteRow | None) -> dict[str, Any]:
    """MFU and MBU by the engine's counters, by the engine itself and by the hardware.

    A minute that is computed again keeps the hardware's: most GPU samples live only some minutes.
    """
    mfu, mbu = found.hardware.mfu, found.hardware.mbu
    if before is not None:
        mfu, mbu = before.hardware_mfu, before.hardware_mbu
    engine = {"engine_mfu": found.engine.mfu, "engine_mbu": found.engine.mbu}
    counters = dict(zip(("counters_mfu", "counters_mbu"), found.counters, strict=True))
    return {**counters, **engine, "hardware_mfu": mfu, "hardware_mbu": mbu}


def _overlapping(requests: MinuteRequests, bounds: MinuteBounds) -> Mask:
    began = requests.from_at <= bounds.until + LONGEST_READ_S
    return began & (bounds.from_at <= requests.ended_at)


class _Minute:
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

    def compute(
        self,
        observed: EngineObservation,
        requests: MinuteRequests,
        gpu_samples: Sequence[GpuSample],
        before: MinuteRow | None,
    ) -> _ComputedMinute:
        """The minute, and what each request cost in it."""
        active = request_activities(requests, observed.increase.cached_share)
        works = whole_works(active, self._serving)
        split = minute_cost(observed, works, self._serving)
        found = minute_efficiency(observed, works, self._serving, gpu_samples)
        joules, billed = self._billed(gpu_samples, before)
        usd = None if billed is None else split.times(billed.usd)
        ended = requests.chosen(self._bounds.time.holds(requests.ended_at))
        minute = MinuteRow(
            engine=self._deployment.engine,
            model=self._model,
            **self._bounds._asdict(),
            gpus=self._gpu_count(before),
            requests=int(np.count_nonzero(worked_on(ended))),
            good_tokens=float(np.nansum(ended.output_tokens[ended.met])),
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
            ledger=minute_ledger(observed, requests),
            ledger_closed=before is not None and bool(before.ledger_closed),
        )
        gpus, time = minute.gpus, self._bounds.time
        hours = None if gpus is None else split.times(gpu_hours(gpus, time))
        return _ComputedMinute(minute, usd, hours)

    def _gpu_count(self, before: MinuteRow | None) -> int | None:
        if before is not None:
            return before.gpus
        return len(self._deployment.billed_gpus(self._gpus)) or None

    def _billed(
        self, gpu_samples: Sequence[GpuSample], before: MinuteRow | None
    ) -> tuple[float | None, Bill | None]:
        """Joules and dollars. A bill stays as it was first computed; only its shares change."""
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


_LOG = logging.getLogger(__name__)

# How far back a late row may change stored minutes.
OPEN_S = 2 * LONGEST_REQUEST_S
# Missed minutes are computed in batches of this size.
_MINUTES_AT_ONCE = 10
# Computing a minute again reads the rows of all minutes that share a request with it. A late row is
# not counted if more requests than this have ended since its start.
MAX_ROWS_AGAIN = 200_000


# A minute as it is now, and as it was before; None if it is new.
OnMinute = Callable[[MinuteRow, MinuteRow | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times of the job in seconds.

    An interval of more than `max_gap_s` between two samples counts as unread. A minute is computed
    `settle_s` after its end, when the rows of its requests are stored. Samples are kept for
    `keep_s`.
    """

    max_gap_s: float
    settle_s: float
    keep_s: float


class MinuteJob:
    """Stores the minutes of one engine: each when it is over, and again when late rows come.

    A scheduler calls `compute` each minute.
    """

    def __init__(
        self,
        deployment: EngineDeployment,
        store: MinuteStore,
        gpu_samples: GpuSamplesOf,
        *,
        timing: Timing,
        on_minute: OnMinute,
        on_failure: Callable[[StoreWrite], None],
    ) -> None:
        """`on_failure` gets the kind of write that failed."""
        self._engine = deployment.engine
        self._store = store
        self._timing = timing
        self._on_minute = on_minute
        self._on_failure = on_failure
        self._calculator = MinuteCalculator(deployment, store, gpu_samples, timing.max_gap_s)

    def compute(self, now: float) -> None:
        """Compute and store every minute that is over and not yet stored."""
        try:
            bounds = list(self._new_bounds(now))
            for first in range(0, len(bounds), _MINUTES_AT_ONCE):
                self._compute_batch(bounds[first : first + _MINUTES_AT_ONCE], now)
            self._close_ledgers(min([each.from_at for each in bounds] + [now]), now)
        except StoreUnavailable as error:
            _LOG.warning("minutes of engine %s are not stored yet: %s", self._engine, error)
            self._on_failure(StoreWrite.ENGINE_MINUTES)

    def _close_ledgers(self, since: float, now: float) -> None:
        """Close the ledgers of the minutes whose requests have all ended."""
        recent = self._store.between(self._engine, since - 2 * LONGEST_OPEN_S, now)
        open_before = ledgers_to_close(recent, now)
        closed = [replace(minute, ledger_closed=True) for minute in open_before]
        if closed:
            self._store.write(closed, (), now)
        for minute, before in zip(closed, open_before, strict=True):
            self._on_minute(minute, before)

    def _new_bounds(self, now: float) -> Iterator[MinuteBounds]:
        """The bounds of each minute that is over and not yet stored."""
        begin = self._begin(now)
        if begin is None:
            return
        starts_at, from_at = begin
        timing = self._timing
        while starts_at + MINUTE_LENGTH_S + timing.max_gap_s + timing.settle_s <= now:
            until = self._start_of(starts_at + MINUTE_LENGTH_S)
            yield MinuteBounds(starts_at, from_at, until)
            starts_at, from_at = starts_at + MINUTE_LENGTH_S, until

    def _begin(self, now: float) -> tuple[int, float] | None:
        """Where the first new minute begins: at the end of the newest stored one."""
        newest = self._store.newest(self._engine)
        oldest = now - self._timing.keep_s
        if newest is not None and newest.until >= oldest:
            return newest.starts_at + MINUTE_LENGTH_S, newest.until
        first = self._store.first_sample_at(self._engine, oldest)
        return None if first is None else (int(first // MINUTE_LENGTH_S) * MINUTE_LENGTH_S, first)

    def _start_of(self, due_at: int) -> float:
        # No two minutes begin at the same sample, even with few samples.
        gap_s = min(self._timing.max_gap_s, MINUTE_LENGTH_S)
        samples = self._store.samples(self._engine, due_at, due_at + gap_s)
        return minute_start_near(due_at, [sample.at for sample in samples], max_gap_s=gap_s)

    def _compute_batch(self, new: Sequence[MinuteBounds], now: float) -> None:
        """Compute new minutes, and those again in which a request has no complete cost yet."""
        open_for, until = self._open_for(new[0].from_at, now), new[-1].until
        oldest = min(open_for.since, open_for.new_from)
        # Requests that ended in the new minutes change what others cost in the minutes before.
        unpriced = self._store.unpriced(self._engine, oldest, until)
        late = open_for.changed_by(unpriced.chosen(open_for.takes(unpriced)))
        *others, last = merged(late.plus(TimeRange(new[0].from_at, until)))
        for time in others:
            self._compute_again(time, [], open_for, now)
        self._compute_again(last, new, open_for, now)

    def _open_for(self, new_from: float, now: float) -> "_OpenFor":
        stored = self._store.between(self._engine, now - OPEN_S - LONGEST_REQUEST_S, new_from)
        rows = 0
        for minute in reversed(stored):
            rows += minute.requests
            if rows > MAX_ROWS_AGAIN:
                return _OpenFor(now - OPEN_S, new_from, minute.until)
        return _OpenFor(now - OPEN_S, new_from)

    def _compute_again(
        self, time: TimeRange, new: Sequence[MinuteBounds], open_for: "_OpenFor", now: float
    ) -> None:
        """Compute all minutes of the requests that share a minute with a changed request.

        Their cost changes in each of their minutes.
        """
        changed = [*map(_bounds_of, self._store.between(self._engine, *time)), *new]
        if not changed:
            return
        begin, end = min(changed).from_at, max(changed).until
        across = self._store.requests_across(self._engine, begin, end)
        touched = across.chosen(open_for.has(across))
        from_at = float(touched.from_at.min(initial=begin))
        until = float(touched.ended_at.max(initial=end))
        before = {
            minute.starts_at: minute for minute in self._store.between(self._engine, from_at, until)
        }
        bounds = sorted([*map(_bounds_of, before.values()), *new])
        computed = self._calculator.compute(bounds, before, open_for.has)
        self._store.write(computed.minutes, computed.costs_in(TimeRange(begin, end)), now)
        for minute in computed.minutes:
            self._on_minute(minute, before.get(minute.starts_at))


class _OpenFor(NamedTuple):
    """Bounds on a request's start and end. A row outside them is too late to count.

    It would change the cost of requests whose minutes are not computed again. A request that
    changes a minute before `crowded_until` would change the cost of too many.
    """

    since: float
    new_from: float
    crowded_until: float = 0.0

    def takes(self, requests: TimeRanges) -> Mask:
        """Which requests without a complete cost come in time."""
        in_time = (requests.from_at >= self.since) | (requests.until >= self.new_from)
        return in_time & (self.changed_by(requests).from_at >= self.crowded_until)

    def changed_by(self, requests: TimeRanges) -> TimeRanges:
        """The times whose minutes such requests change.

        The last sample of the minute before may show one, if it began while that was read.
        """
        return TimeRanges(requests.from_at - LONGEST_READ_S, requests.until)

    def has(self, requests: MinuteRequests) -> Mask:
        """Which requests have a share of their minutes: they had one before, or come in time."""
        return requests.priced | self.takes(TimeRanges(requests.from_at, requests.ended_at))


def _bounds_of(minute: MinuteRow) -> MinuteBounds:
    return MinuteBounds(minute.starts_at, minute.from_at, minute.until)
