"""Signals of one engine for autoscalers: latency over its limit, arrivals, the rate that it holds.

Percentiles are of requests or, without any, of the engine's own histograms; none is an average of
percentiles. Times are Unix seconds, rates requests per second, and unknown is None.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import sqrt

import msgspec

from agent.analysis.engine_counts import added_histograms, counts_between
from agent.analysis.engine_figures import LATENCIES, by_model_alone
from agent.analysis.failures.progress import restart_between
from agent.analysis.histogram_bounds import counts_within, quantile_bounds
from agent.analysis.quantiles import bin_of, quantile, value_of
from agent.analysis.verdicts import MET, MISSED, ratios_to_limits
from agent.catalog import engine_facts as fact
from agent.catalog.definitions import Verdict
from agent.catalog.metric import Metric
from agent.catalog.time_units import DAY_S, HOUR_S, MINUTE_S
from agent.records.engine import EngineSample, HistogramSnapshot
from agent.records.engine_counts import EngineCounts
from agent.records.held_rate import RateEvidence
from agent.records.objective import JudgedRequest, Objective
from agent.records.request import Status

QUANTILE = 0.9
# By the value of the label `window`.
WINDOWS_S: Mapping[str, float] = {"1m": 60.0, "5m": 300.0}
SLOT_S = 5.0
_SLOTS = int(max(WINDOWS_S.values()) // SLOT_S)
# A minute is judged this long after its end, when most of its requests have ended.
JUDGED_AFTER_S = 300.0
# A minute with fewer judged requests says nothing of its rate.
MIN_JUDGED = 10
# Two minutes of which the older one is this much older count 1 : 2. A change of the model, of its
# flags or of the prompts is followed within about this time.
HALF_LIFE_S = float(HOUR_S)
FORGOTTEN_AFTER_S = 7.0 * DAY_S
# Minutes at this share of a rate or more, up to the rate, are evidence for it.
NEAR = 0.8
# One-sided 95 % of the normal distribution.
_Z = 1.6449
# Latency grows without bound beyond the rate that is held, so it does not say how far beyond.
MOST_BY_LATENCY = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A rate that an engine was seen to hold within an objective.

    `age_s` is the time since the last minute that held about this rate. `confidence` is the share
    of such minutes that hold it, at least, with a probability of 95 %. `is_limit`: minutes with
    more requests missed, so that more is not held. Without it the engine may hold more.
    """

    per_s: float
    age_s: float
    confidence: float
    is_limit: bool


def _decayed(evidence: RateEvidence, at: float) -> RateEvidence:
    factor = 2.0 ** -(max(at - evidence.at, 0.0) / HALF_LIFE_S)
    held, missed = evidence.held * factor, evidence.missed * factor
    return msgspec.structs.replace(evidence, at=max(at, evidence.at), held=held, missed=missed)


def held_bin(minutes: Mapping[int, tuple[float, float]]) -> int | None:
    """The rate that the fewest minutes contradict, of equals the lowest.

    `minutes` has the weights of those that held and that missed, by the bin of their rate. A minute
    that missed at the rate or below contradicts it, and one that held above it. None if fewer
    minutes contradict that no rate is held.
    """
    wrong = fewest = sum(held for held, _ in minutes.values())
    found, rounding = None, 1e-9 * fewest
    for rate_bin in sorted(minutes):
        held, missed = minutes[rate_bin]
        wrong += missed - held
        if held > 0.0 and wrong < fewest - rounding:
            found, fewest = rate_bin, wrong
    return found


class HeldRate:
    """Learns the rate that an engine holds, from minutes that held an objective or missed it."""

    def __init__(self, evidence: Iterable[RateEvidence] = ()) -> None:
        """`evidence` is what an earlier run of the agent learnt."""
        self._by_rate = {bin_of(each.per_s): each for each in evidence}

    @property
    def evidence(self) -> Sequence[RateEvidence]:
        """What was learnt."""
        return tuple(self._by_rate.values())

    def learn(self, per_s: float, at: float, *, held: bool) -> None:
        """Add a minute that ended at `at`."""
        key = bin_of(per_s)
        first = RateEvidence(per_s=value_of(key), at=at, seen_at=at)
        before = _decayed(self._by_rate.get(key, first), at)
        self._by_rate[key] = msgspec.structs.replace(
            before,
            held=before.held + held,
            missed=before.missed + (not held),
            seen_at=max(at, before.seen_at),
            held_at=max(at, before.held_at or at) if held else before.held_at,
        )

    def held(self, now: float) -> Held | None:
        """The rate that is held; None while no rate is known to be."""
        oldest = now - FORGOTTEN_AFTER_S
        self._by_rate = {
            key: _decayed(of, now) for key, of in self._by_rate.items() if of.seen_at >= oldest
        }
        minutes = {key: (of.held, of.missed) for key, of in self._by_rate.items()}
        best = held_bin(minutes)
        if best is None:
            return None
        near = [
            of
            for key, of in self._by_rate.items()
            if key <= best and value_of(key) >= NEAR * value_of(best)
        ]
        return Held(
            per_s=value_of(best),
            age_s=max(now - max(of.held_at or oldest for of in near), 0.0),
            confidence=_surely(sum(of.held for of in near), sum(of.missed for of in near)),
            is_limit=any(key > best and missed > 0.0 for key, (_, missed) in minutes.items()),
        )


def _surely(held: float, missed: float) -> float:
    """The lower end of Wilson's interval of a share (E. B. Wilson, JASA 22, 1927)."""
    count = held + missed
    if count <= 0.0:
        return 0.0
    share, z2 = held / count, _Z * _Z
    spread = _Z * sqrt(share * (1.0 - share) / count + z2 / (4.0 * count * count))
    return max((share + z2 / (2.0 * count) - spread) / (1.0 + z2 / count), 0.0)


def replicas_needed(
    arrival_per_s: float | None, held: Held | None, ratio: float | None, occupied: float | None
) -> float | None:
    """How many replicas like this one the load of this one needs, as a fraction.

    If its limit is known, the arrival rate over the rate that is held, and more while latency is
    over its limit already. Else latency over its limit, or the share of the engine that is occupied
    if that is more: latency often rises only when all of it is.
    """
    by_latency = None if ratio is None else min(ratio, MOST_BY_LATENCY)
    if held is None or not held.is_limit or arrival_per_s is None:
        return max((each for each in (by_latency, occupied) if each is not None), default=None)
    by_rate = arrival_per_s / held.per_s
    return max(by_rate, by_latency) if by_latency is not None and by_latency > 1.0 else by_rate


Limited = tuple[str, str]
"""An objective and one of its limits."""


@dataclass(slots=True)
class _Counted:
    """What an engine counted in some time: arrivals, and its histograms by limit.

    `occupied_s` are the seconds for which it was occupied, times the share that was.
    """

    arrivals: float = 0.0
    covered_s: float = 0.0
    occupied_s: float = 0.0
    occupied_known_s: float = 0.0
    histograms: dict[str, HistogramSnapshot] = field(default_factory=dict)

    def add(self, arrivals: float | None, counts: EngineCounts) -> None:
        if arrivals is not None:
            self.arrivals += arrivals
            self.covered_s += counts.covered_s
        occupied = _occupied(counts)
        if occupied is not None:
            self.occupied_s += occupied * counts.covered_s
            self.occupied_known_s += counts.covered_s
        for limit, metric in _MEASURED.items():
            more, known = counts.histograms.get(metric.name), self.histograms.get(limit)
            if more is not None:
                self.histograms[limit] = more if known is None else added_histograms(known, more)


@dataclass(slots=True)
class _SignalSlot(_Counted):
    """With the ratios of the requests that ended in it, by bin."""

    ratios: dict[Limited, Counter[int]] = field(default_factory=dict)


@dataclass(slots=True)
class _SignalMinute(_Counted):
    """With the verdicts on the requests that began in it, by objective."""

    verdicts: Counter[tuple[str, Verdict]] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSignals:
    """The signals of one objective; `ratios` by window, without those that are unknown."""

    ratios: Mapping[str, float]
    held: Held | None
    needed: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """The signals of one engine now."""

    arrival_per_s: float | None
    by_objective: Mapping[str, ObjectiveSignals]


class EngineSignals:
    """Keeps what the signals of one engine are computed from. Not for several threads.

    Its memory is bounded: five minutes in slots, the minutes that are not judged yet, and counts by
    rate.
    """

    def __init__(self, objectives: Sequence[Objective]) -> None:
        self._objectives = {each.name: each for each in objectives}
        self._held = {name: HeldRate() for name in self._objectives}
        self._missed_before: dict[str, tuple[int, float]] = {}
        self._slots: dict[int, _SignalSlot] = {}
        self._minutes: dict[int, _SignalMinute] = {}
        self._sample: EngineSample | None = None
        self._learnt_until = -1

    def sample(self, sample: EngineSample) -> None:
        """Add a sample; the engine's increase since the one before counts at its time."""
        before, self._sample = self._sample, sample
        counts = None if before is None else counts_between(before, sample)
        if before is not None and counts is not None:
            arrivals = _arrivals(before, sample, counts)
            for part in (self._slot(sample.at), self._minute(sample.at)):
                if part is not None:
                    part.add(arrivals, counts)
        self._learn(sample.at)

    def ended(self, requests: Sequence[JudgedRequest]) -> None:
        """Add requests whose verdicts are final."""
        for request in requests:
            slot = self._slot(request.record.ended_at)
            if slot is not None and request.record.status is not Status.INVALID:
                self._add_ratios(slot, request)
            minute = self._minute(request.record.started_at)
            if minute is not None:
                minute.verdicts.update(request.judgement.by_objective)
        self._learn(max(request.record.received_at for request in requests))

    def _add_ratios(self, slot: _SignalSlot, request: JudgedRequest) -> None:
        for name, _ in request.judgement.by_objective:
            objective = self._objectives.get(name)
            for limit, ratio in ratios_to_limits(request.record, objective) if objective else ():
                slot.ratios.setdefault((name, limit), Counter())[bin_of(ratio)] += 1

    def _slot(self, at: float) -> _SignalSlot | None:
        """The slot of a time; None if it is too old for every window."""
        number = int(at // SLOT_S)
        if number not in self._slots:
            if number < max(self._slots, default=number) - _SLOTS:
                return None
            first = number - _SLOTS
            self._slots = {key: each for key, each in self._slots.items() if key >= first}
            self._slots[number] = _SignalSlot()
        return self._slots[number]

    def _minute(self, at: float) -> _SignalMinute | None:
        number = int(at // MINUTE_S)
        return (
            self._minutes.setdefault(number, _SignalMinute())
            if number > self._learnt_until
            else None
        )

    def _learn(self, now: float) -> None:
        """Judge the minutes that ended long enough ago."""
        last = int((now - JUDGED_AFTER_S) // MINUTE_S) - 1
        for number in sorted(each for each in self._minutes if each <= last):
            minute = self._minutes.pop(number)
            for objective in self._objectives.values():
                self._learn_minute(number, minute, objective)
        self._learnt_until = max(last, self._learnt_until)

    def _learn_minute(self, number: int, minute: _SignalMinute, objective: Objective) -> None:
        held = _is_held(minute, objective, self.model)
        # Half of a minute does not show what the whole of it would have done.
        if held is None or minute.covered_s < 0.75 * MINUTE_S or minute.arrivals <= 0.0:
            return
        per_s = minute.arrivals / minute.covered_s
        before, rate_before = self._missed_before.get(objective.name, (-1, 0.0))
        follows = before == number - 1
        if not held:
            self._missed_before[objective.name] = number, max(per_s, follows * rate_before)
            if follows and per_s < rate_before:
                # Its requests waited for those of the minute before.
                return
        ended_at = (number + 1.0) * MINUTE_S
        self._held[objective.name].learn(per_s, ended_at, held=held)

    @property
    def learnt(self) -> Mapping[str, Sequence[RateEvidence]]:
        """The minutes of about each rate, by objective."""
        return {name: held.evidence for name, held in self._held.items() if held.evidence}

    def remember(self, objective: str, evidence: Sequence[RateEvidence]) -> None:
        """Take what an earlier run learnt of an objective, unless this one has learnt something."""
        held = self._held.get(objective)
        if held is not None and not held.evidence:
            self._held[objective] = HeldRate(evidence)

    @property
    def model(self) -> str | None:
        """The model of the newest sample."""
        return None if self._sample is None else self._sample.model

    def signals(self, now: float) -> Signals:
        """The signals at a time that is not before any sample."""
        arrival_per_s, occupied = self._arrival_per_s(now), self._occupied(now)
        found = {}
        for name, objective in self._objectives.items():
            ratios = {
                window: ratio
                for window, length_s in WINDOWS_S.items()
                if (ratio := self._ratio(objective, now - length_s)) is not None
            }
            held = self._held[name].held(now)
            needed = replicas_needed(arrival_per_s, held, ratios.get("1m"), occupied)
            found[name] = ObjectiveSignals(ratios=ratios, held=held, needed=needed)
        return Signals(arrival_per_s=arrival_per_s, by_objective=found)

    def _since(self, since: float) -> list[_SignalSlot]:
        first = int(since // SLOT_S)
        return [slot for number, slot in sorted(self._slots.items()) if number > first]

    def _arrival_per_s(self, now: float) -> float | None:
        slots = self._since(now - WINDOWS_S["1m"])
        covered_s = sum(slot.covered_s for slot in slots)
        if covered_s < SLOT_S:
            return None
        return max(sum(slot.arrivals for slot in slots), 0.0) / covered_s

    def _occupied(self, now: float) -> float | None:
        """The share of the engine that was occupied in the newest slot of the last minute."""
        known = [slot for slot in self._since(now - WINDOWS_S["1m"]) if slot.occupied_known_s]
        return known[-1].occupied_s / known[-1].occupied_known_s if known else None

    def _ratio(self, objective: Objective, since: float) -> float | None:
        """The worst ratio over the limits of an objective."""
        slots = self._since(since)
        ratios = [_ratio(slots, objective, limit, self.model) for limit in objective.limits]
        return max((each for each in ratios if each is not None), default=None)


_MEASURED = {limit: LATENCIES[limit] for limit in ("ttft", "tpot", "e2e")}


def _arrivals(before: EngineSample, after: EngineSample, counts: EngineCounts) -> float | None:
    """Requests that came between two samples: those that finished, and the growth of the load."""
    load = _load(after)
    finished = [value for (name, _), value in counts.counters.items() if name == _FINISHED]
    if load is None or not finished:
        return None
    # What a process that ended had in work is lost.
    earlier = 0.0 if restart_between(before, after) is not None else _load(before)
    return None if earlier is None else sum(finished) + load - earlier


def _occupied(counts: EngineCounts) -> float | None:
    """The share of the KV cache in use or, if that is more, of the places in the batch."""
    kv_usage = _mean(counts, fact.KV_CACHE_USAGE)
    running, places = _mean(counts, fact.REQUESTS_RUNNING), _mean(counts, fact.MAX_RUNNING_REQUESTS)
    batch = running / places if running is not None and places else None
    return max((each for each in (kv_usage, batch) if each is not None), default=None)


def _mean(counts: EngineCounts, metric: Metric) -> float | None:
    found = counts.gauges.get((metric.name, ()))
    return found.mean if found is not None and found.known_s else None


_FINISHED = fact.REQUESTS_FINISHED.name


def _load(sample: EngineSample) -> float | None:
    running = sample.fact(fact.REQUESTS_RUNNING.name)
    waiting = sample.fact(fact.REQUESTS_WAITING.name)
    return None if running is None or waiting is None else running + waiting


def _ratio(
    slots: Sequence[_SignalSlot], objective: Objective, limit: str, model: str | None
) -> float | None:
    """The quantile of latency over the limit: of requests, else of the engine's histogram.

    Requests are known when they end, and the histogram has a first token when it comes: the ratio
    is at least what the histogram says for sure.
    """
    bins: Counter[int] = Counter()
    for slot in slots:
        bins.update(slot.ratios.get((objective.name, limit), {}))
    of_requests = quantile(bins, QUANTILE)
    histogram = _merged(slots, limit) if _counts_all(objective, model) else None
    bounds = None if histogram is None else quantile_bounds(histogram, QUANTILE)
    limit_s: float = getattr(objective, f"{limit}_s")
    if bounds is None:
        return of_requests
    if of_requests is not None:
        return max(of_requests, bounds.lower / limit_s)
    return None if bounds.estimate is None else bounds.estimate / limit_s


def _counts_all(objective: Objective, model: str | None) -> bool:
    """Whether an engine's histograms are of the requests of the objective alone."""
    return by_model_alone(objective) and objective.match.covers_model(model)


def _merged(slots: Sequence[_SignalSlot], limit: str) -> HistogramSnapshot | None:
    known = [slot.histograms[limit] for slot in slots if limit in slot.histograms]
    return reduce(added_histograms, known) if known else None


def _is_held(minute: _SignalMinute, objective: Objective, model: str | None) -> bool | None:
    """Whether a minute held the objective; None if too few of its requests are judged."""
    met, missed = (minute.verdicts[objective.name, each] for each in (MET, MISSED))
    if met + missed >= MIN_JUDGED:
        return met >= objective.target * (met + missed)
    if met + missed or not _counts_all(objective, model):
        return None
    shares = [_share_within(minute, objective, limit) for limit in objective.limits]
    known = [each for each in shares if each is not None]
    return min(known) >= objective.target if known and len(known) == len(shares) else None


def _share_within(minute: _SignalMinute, objective: Objective, limit: str) -> float | None:
    """The share of what the engine measured that was surely within a limit."""
    histogram = minute.histograms.get(limit)
    if histogram is None or histogram.counts[-1] < MIN_JUDGED:
        return None
    surely, _, measured = counts_within(histogram, getattr(objective, f"{limit}_s"))
    return surely / measured
