"""The latency histograms of requests, by engine and model."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from agent.analysis.quantiles import value_of
from agent.catalog import metrics as m
from agent.catalog.metric import Metric
from agent.outputs.prometheus.bucket_histogram import BucketHistogram, CountedValues, Trace
from agent.records.objective import Objective
from agent.records.request import RequestRecord, Status, Vantage

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


def bounds_for(metric: Metric, objectives: Iterable[Objective]) -> tuple[float, ...]:
    """The metric's bucket bounds, with the limit of every objective among them."""
    latency = LATENCIES[metric]
    limit = latency.limit
    limits = {getattr(objective, limit) for objective in objectives} if limit else set()
    return tuple(sorted({*latency.bounds_s, *(value for value in limits if value is not None)}))


class LatencyHistograms:
    """Counts requests into the histograms of their engine and model. Not for several threads."""

    def __init__(self, objectives: Sequence[Objective], *, with_bins: bool = False) -> None:
        self._with_bins = with_bins
        self._bounds = {metric: bounds_for(metric, objectives) for metric in LATENCIES}
        self._bounds[m.CHUNK_GAP] = m.TPOT_BOUNDS_S
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
            histogram.add({value_of(place): count for place, count in gaps.items()})

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
    """Where a record's latencies were taken: at the proxy where it saw the request."""
    return Vantage.ENGINE if record.vantage is Vantage.ENGINE else Vantage.PROXY
