"""Histograms of the latencies of requests, with explicit buckets and exemplars."""

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter

from prometheus_client import utils
from prometheus_client.samples import Exemplar

from agent.analysis.genai import latencies_by_convention
from agent.analysis.quantiles import Bins, bin_of, bins_of, value_of
from agent.catalog import genai
from agent.catalog import metrics as m
from agent.catalog.metric import Metric
from agent.records.objective import Objective
from agent.records.request import RequestRecord, Status, Vantage

Bucket = tuple[str, float, Exemplar | None]
# The id of a request's trace, and the Unix time of the request.
Trace = tuple[str, float]

# An engine's error names itself: so many names, and the conventions' own for others. HTTP statuses
# and our own names are few.
_MAX_ERRORS, _OTHER_ERROR = 32, "_OTHER"
_OWN_ERRORS = frozenset(Status)
_HTTP_STATUS = re.compile("[1-5][0-9]{2}")

# Prometheus refuses an exemplar that is older than the one before it in the series, or has the same
# millisecond and a lower value. It cuts milliseconds off a float, so that one of them may vanish.
_APART_S = 0.002


def bound_text(bound: float) -> str:
    """A bucket's bound as every Prometheus client writes it: `0.5`, `1.0`, `+Inf`."""
    return str(utils.floatToGoString(bound))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class CountedValues:
    """What a histogram holds: cumulative buckets, the sum, and the bins if it has them."""

    buckets: list[Bucket]
    sum: float
    bins: Bins | None = None


class BucketHistogram:
    """Counts by inclusive upper bounds; a value over the last bound counts in `+Inf`."""

    def __init__(self, bounds: Sequence[float], *, with_bins: bool = False) -> None:
        self._bins: Counter[int] | None = Counter() if with_bins else None
        self._bounds = tuple(bounds)
        self._texts = tuple(bound_text(bound) for bound in (*bounds, inf))
        self._counts = [0] * len(self._texts)
        self._sum = 0.0
        self._exemplars: dict[int, tuple[float, Trace]] = {}

    def observe(self, values: Sequence[float], traces: Sequence[Trace]) -> None:
        """Count values, each with its trace; the newest is the last."""
        bounds = self._bounds
        indices = [bisect_left(bounds, value) for value in values]
        for index, count in Counter(indices).items():
            self._counts[index] += count
        self._sum += sum(values)
        if self._bins is not None:
            self._bins.update(bins_of(values))
        # The newest of each bucket; no Python code runs per value.
        newest = dict(zip(indices, zip(values, traces, strict=True), strict=True))
        for index, (value, trace) in newest.items():
            held = self._exemplars.get(index)
            if held is None or trace[1] >= held[1][1] + _APART_S:
                self._exemplars[index] = value, trace

    def add(self, counts: Mapping[float, int]) -> None:
        """Count values by how often they occurred, without exemplars."""
        for value, count in counts.items():
            self._counts[bisect_left(self._bounds, value)] += count
            self._sum += value * count
            if self._bins is not None:
                self._bins[bin_of(value)] += count

    def buckets(self) -> list[Bucket]:
        """Cumulative buckets as prometheus_client takes them, `+Inf` last."""
        seen = 0
        buckets: list[Bucket] = []
        for index, text in enumerate(self._texts):
            seen += self._counts[index]
            buckets.append((text, float(seen), self._exemplar(index)))
        return buckets

    def _exemplar(self, index: int) -> Exemplar | None:
        found = self._exemplars.get(index)
        if found is None:
            return None
        value, (trace_id, at) = found
        return Exemplar({"trace_id": trace_id}, value, at)

    def counted(self) -> CountedValues:
        """Everything it holds now."""
        bins = None if self._bins is None else dict(self._bins)
        return CountedValues(self.buckets(), self._sum, bins)

    @property
    def sum(self) -> float:
        """The sum of all values."""
        return self._sum


Labels = tuple[str, ...]

_VANTAGE = "vantage"
_RECEIVED_AT = attrgetter("received_at")


@dataclass(frozen=True, slots=True)
class Latency:
    """A latency of a request that a histogram counts; `limit` is its limit in an objective."""

    value: Callable[[RequestRecord], float | None]
    bounds_s: tuple[float, ...]
    limit: str | None = None


def _first_visible_s(record: RequestRecord) -> float | None:
    return record.proxied and record.proxied.first_visible_s


def _holdback_s(record: RequestRecord) -> float | None:
    return record.engine_view and record.engine_view.holdback_s


LATENCIES: Mapping[Metric, Latency] = {
    m.TTFT: Latency(lambda record: record.ttft_s, m.TTFT_BOUNDS_S, "ttft_s"),
    m.TPOT: Latency(lambda record: record.tpot_s, m.TPOT_BOUNDS_S, "tpot_s"),
    m.DURATION: Latency(lambda record: record.e2e_s, m.DURATION_BOUNDS_S, "e2e_s"),
    m.QUEUE: Latency(lambda record: record.queue_s, m.TTFT_BOUNDS_S),
    m.PREFILL: Latency(lambda record: record.prefill_s, m.TTFT_BOUNDS_S),
    m.DECODE: Latency(lambda record: record.decode_s, m.DURATION_BOUNDS_S),
    m.FIRST_VISIBLE: Latency(_first_visible_s, m.TTFT_BOUNDS_S, "ttft_s"),
    m.MAX_GAP: Latency(lambda record: record.max_gap_s, m.TPOT_BOUNDS_S),
    m.HOLDBACK: Latency(_holdback_s, m.TTFT_BOUNDS_S),
}


GENAI_BOUNDS_S: Mapping[Metric, tuple[float, ...]] = {
    genai.SERVER_DURATION: m.DURATION_BOUNDS_S,
    genai.SERVER_TTFT: m.TTFT_BOUNDS_S,
    genai.SERVER_TPOT: m.TPOT_BOUNDS_S,
    genai.CLIENT_DURATION: m.DURATION_BOUNDS_S,
    genai.CLIENT_TTFC: m.TTFT_BOUNDS_S,
}


def bounds_for(metric: Metric, objectives: Iterable[Objective]) -> tuple[float, ...]:
    """The metric's bucket bounds, with the limit of every objective among them."""
    latency = LATENCIES[metric]
    limit = latency.limit
    limits = {getattr(objective, limit) for objective in objectives} if limit else set()
    return tuple(sorted({*latency.bounds_s, *(value for value in limits if value is not None)}))


class LatencyHistograms:
    """Counts requests into the histograms of their engine and model. Not for several threads."""

    def __init__(
        self,
        objectives: Sequence[Objective],
        *,
        with_bins: bool = False,
        with_genai: bool = False,
    ) -> None:
        """`with_genai`: also those of OpenTelemetry's conventions for GenAI."""
        self._with_bins = with_bins
        self._by_convention = with_genai
        self._errors: set[str] = set()
        bounds = {metric: bounds_for(metric, objectives) for metric in LATENCIES}
        self._bounds = {**bounds, m.CHUNK_GAP: m.TPOT_BOUNDS_S, **GENAI_BOUNDS_S}
        self._histograms: dict[tuple[Metric, Labels], BucketHistogram] = {}

    def count(self, engine_model: Labels, records: Sequence[RequestRecord]) -> None:
        """Count requests of one engine and model, without those that were refused as invalid.

        A refusal takes no time, and would hide how long real responses take.
        """
        by_vantage: dict[str, list[RequestRecord]] = defaultdict(list)
        # A request that waited in vain for its other view is older than those counted before it.
        for record in sorted(records, key=_RECEIVED_AT):
            if record.status is not Status.INVALID:
                by_vantage[_taken_at(record)].append(record)
        for vantage, seen in by_vantage.items():
            traces = [(record.trace_id, record.received_at) for record in seen]
            for metric, latency in LATENCIES.items():
                own = (vantage,) if _VANTAGE in metric.labels else ()
                values = list(map(latency.value, seen))
                self._observe(metric, (*engine_model, *own), values, traces)
        self._count_gaps(engine_model, by_vantage[Vantage.PROXY])
        if self._by_convention:
            self._count_by_convention(engine_model, records)

    def _observe(
        self,
        metric: Metric,
        labels: Labels,
        values: Sequence[float | None],
        traces: Sequence[Trace],
    ) -> None:
        if None in values:
            known = [pair for pair in zip(values, traces, strict=True) if pair[0] is not None]
            values, traces = [pair[0] for pair in known], [pair[1] for pair in known]
        if values:
            self._histogram(metric, labels).observe(values, traces)  # type: ignore[arg-type]

    def _count_gaps(self, labels: Labels, records: Sequence[RequestRecord]) -> None:
        """Count gaps by the value of their bin: only the bin is known."""
        gaps: Counter[int] = Counter()
        for record in records:
            gaps.update((record.proxied and record.proxied.gaps) or {})
        if gaps:
            histogram = self._histogram(m.CHUNK_GAP, labels)
            histogram.add({value_of(index): count for index, count in gaps.items()})

    def _count_by_convention(self, labels: Labels, records: Sequence[RequestRecord]) -> None:
        found: defaultdict[tuple[Metric, Labels], list[tuple[float | None, Trace]]]
        found = defaultdict(list)
        for record in sorted(records, key=_RECEIVED_AT):
            trace = record.trace_id, record.received_at
            operation = genai.operation(record.route)
            for metric, error, value in latencies_by_convention(record):
                own = (*labels, operation, self._known_error(error))
                found[metric, own].append((value, trace))
        for (metric, own), pairs in found.items():
            self._observe(metric, own, [pair[0] for pair in pairs], [pair[1] for pair in pairs])

    def _known_error(self, error: str) -> str:
        if not error or error in _OWN_ERRORS or _HTTP_STATUS.fullmatch(error):
            return error
        if len(self._errors) < _MAX_ERRORS:
            self._errors.add(error)
        return error if error in self._errors else _OTHER_ERROR

    def _histogram(self, metric: Metric, labels: Labels) -> BucketHistogram:
        histogram = self._histograms.get((metric, labels))
        if histogram is None:
            histogram = BucketHistogram(self._bounds[metric], with_bins=self._with_bins)
            self._histograms[metric, labels] = histogram
        return histogram

    def forget(self, engine_models: Collection[Labels]) -> None:
        """Remove the histograms of these pairs of engine and model."""
        for key in [key for key in self._histograms if key[1][:2] in engine_models]:
            del self._histograms[key]

    def snapshot(self) -> Mapping[tuple[Metric, Labels], CountedValues]:
        """What each histogram holds now."""
        return {key: histogram.counted() for key, histogram in self._histograms.items()}


def _taken_at(record: RequestRecord) -> str:
    """Where a record's latencies were taken: at the proxy if it saw the request."""
    return Vantage.ENGINE if record.vantage is Vantage.ENGINE else Vantage.PROXY
