"""Pushes all metrics over OTLP.

Names, units and kinds are the ones that the Prometheus receiver of a collector makes of `/metrics`:
names are the same as there, with the `_total` of a counter. A receiver that would add a unit or
`_total` to a name finds it there already, so every receiver has the names of `/metrics`.
"""

import gzip
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isinf
from pathlib import Path
from typing import Protocol

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE,
    DataPointFlags,
    Exemplar,
    ExponentialHistogramDataPoint,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from prometheus_client.core import Metric as Family
from prometheus_client.samples import Exemplar as PrometheusExemplar
from prometheus_client.samples import Sample

from agent.analysis.quantiles import Bins, exponential_from
from agent.catalog.efficiency_metrics import EFFICIENCY_METRICS
from agent.catalog.engine_facts import ENGINE_FACTS
from agent.catalog.genai import GENAI_METRICS
from agent.catalog.gpu_facts import GPU_FACTS
from agent.catalog.host_facts import HOST_FACTS
from agent.catalog.metric import Kind, Unit
from agent.catalog.metrics import AGENT_METRICS
from agent.catalog.routers import ROUTER_FACTS
from agent.outputs.otlp_forwarder import PROTOBUF, ForwardCounter, Forwarder, HttpDestination
from agent.settings.settings_model import OtlpMetricsSettings

Labels = tuple[tuple[str, str], ...]
# By the name of a histogram and the values of its labels, in their order.
BinsOf = Mapping[tuple[str, tuple[str, ...]], Bins]

_BOUND = "le"


@dataclass(slots=True)
class Buckets:
    """The values of a histogram by explicit upper bounds, the highest of which is infinite."""

    bounds: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sum: float | None = None
    exemplars: list[PrometheusExemplar] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PushedSeries:
    """One series of a family: a number, or buckets, with the bins of an exponential histogram."""

    labels: Labels
    value: float = 0.0
    buckets: Buckets | None = None
    bins: Bins | None = None


@dataclass(frozen=True, slots=True)
class SeriesFamily:
    """All series of one name; the exposition has the same name."""

    name: str
    kind: Kind
    help: str
    series: Iterable[PushedSeries]


def series_of(family: Family) -> SeriesFamily:
    """The series of a family; a counter has the ending `_total`, as on the exposition."""
    kind = Kind(family.type)
    name = f"{family.name}_total" if kind is Kind.COUNTER else family.name
    series = _histograms(family.samples) if kind is Kind.HISTOGRAM else _numbers(family.samples)
    return SeriesFamily(name, kind, family.documentation, series)


def _numbers(samples: Iterable[Sample]) -> Iterator[PushedSeries]:
    for sample in samples:
        yield PushedSeries(tuple(sample.labels.items()), sample.value)


def _histograms(samples: Iterable[Sample]) -> Iterator[PushedSeries]:
    found: dict[Labels, Buckets] = {}
    for sample in samples:
        labels = tuple(pair for pair in sample.labels.items() if pair[0] != _BOUND)
        buckets = found.setdefault(labels, Buckets())
        if _BOUND in sample.labels:
            _add_bucket(buckets, sample)
        elif sample.name.endswith("_sum"):
            buckets.sum = sample.value
    for labels, buckets in found.items():
        yield PushedSeries(labels, buckets=buckets)


def _add_bucket(buckets: Buckets, sample: Sample) -> None:
    bound = float(sample.labels[_BOUND])
    if not isinf(bound):
        buckets.bounds.append(bound)
    # Prometheus counts up to each bound, OTLP within each bucket. An engine may count while its
    # exposition is made, so a difference may be below 0.
    buckets.counts.append(max(int(sample.value) - sum(buckets.counts), 0))
    if sample.exemplar is not None:
        buckets.exemplars.append(sample.exemplar)


_NO_VALUE = DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
_HEX_DIGITS_OF_TRACE = 32


@dataclass(frozen=True, slots=True)
class Times:
    """When a point was read and when its counting began, in Unix nanoseconds; 0 is unknown."""

    read_ns: int
    started_ns: int = 0


def nanoseconds(unix_s: float) -> int:
    """Unix time in nanoseconds."""
    return int(unix_s * 1e9)


def attributes(labels: Iterable[tuple[str, str]]) -> list[KeyValue]:
    """Labels as attributes."""
    return [KeyValue(key=key, value=AnyValue(string_value=value)) for key, value in labels]


def number_point(labels: Labels, times: Times, value: float) -> NumberDataPoint:
    """The point of a counter or a gauge."""
    return NumberDataPoint(
        attributes=attributes(labels),
        start_time_unix_nano=times.started_ns,
        time_unix_nano=times.read_ns,
        as_double=value,
    )


def explicit_point(labels: Labels, times: Times, buckets: Buckets) -> HistogramDataPoint:
    """The point of a histogram with explicit bounds."""
    return HistogramDataPoint(
        attributes=attributes(labels),
        start_time_unix_nano=times.started_ns,
        time_unix_nano=times.read_ns,
        count=sum(buckets.counts),
        sum=buckets.sum,
        bucket_counts=buckets.counts,
        explicit_bounds=buckets.bounds,
        exemplars=_exemplars(buckets.exemplars),
    )


def exponential_point(
    labels: Labels, times: Times, buckets: Buckets, bins: Bins, max_buckets: int
) -> ExponentialHistogramDataPoint:
    """The point of an exponential histogram of bins; `buckets` give its sum and its exemplars."""
    histogram = exponential_from(bins, max_buckets)
    return ExponentialHistogramDataPoint(
        attributes=attributes(labels),
        start_time_unix_nano=times.started_ns,
        time_unix_nano=times.read_ns,
        count=histogram.count,
        sum=buckets.sum,
        scale=histogram.scale,
        zero_count=histogram.zero_count,
        zero_threshold=histogram.zero_threshold,
        positive=ExponentialHistogramDataPoint.Buckets(
            offset=histogram.offset, bucket_counts=histogram.bucket_counts
        ),
        exemplars=_exemplars(buckets.exemplars),
    )


def ended_point(labels: Labels, read_ns: int) -> NumberDataPoint:
    """The point that ends a series of numbers: it has no value from this time on."""
    return NumberDataPoint(attributes=attributes(labels), time_unix_nano=read_ns, flags=_NO_VALUE)


def ended_histogram(labels: Labels, read_ns: int) -> HistogramDataPoint:
    """The point that ends a histogram with explicit bounds."""
    return HistogramDataPoint(
        attributes=attributes(labels), time_unix_nano=read_ns, flags=_NO_VALUE
    )


def ended_exponential(labels: Labels, read_ns: int) -> ExponentialHistogramDataPoint:
    """The point that ends an exponential histogram."""
    return ExponentialHistogramDataPoint(
        attributes=attributes(labels), time_unix_nano=read_ns, flags=_NO_VALUE
    )


def _exemplars(exemplars: Iterable[PrometheusExemplar]) -> Iterator[Exemplar]:
    for exemplar in exemplars:
        trace_id = exemplar.labels.get("trace_id", "")
        if len(trace_id) == _HEX_DIGITS_OF_TRACE and exemplar.timestamp is not None:
            yield Exemplar(
                trace_id=bytes.fromhex(trace_id),
                as_double=exemplar.value,
                time_unix_nano=nanoseconds(float(exemplar.timestamp)),
            )


SCOPE = "goodput-agent"

# Units by UCUM (Unified Code for Units of Measure), as OpenTelemetry requires.
_UCUM = {
    Unit.SECONDS: "s",
    Unit.BYTES: "By",
    Unit.RATIO: "1",
    Unit.JOULES: "J",
    Unit.WATTS: "W",
    Unit.CELSIUS: "Cel",
    Unit.HERTZ: "Hz",
    Unit.NONE: "",
}
_UNITS = {
    metric.name: _UCUM[metric.unit]
    for metric in (
        *(*AGENT_METRICS, *GENAI_METRICS, *EFFICIENCY_METRICS),
        *(*ENGINE_FACTS, *HOST_FACTS, *GPU_FACTS, *ROUTER_FACTS),
    )
}
# Counters of these metrics began with the engine's process.
_OF_ENGINES = frozenset(fact.name for fact in ENGINE_FACTS)
# Counters of these began with a driver, a container or a process whose start is unknown.
_OF_MACHINES = frozenset(fact.name for fact in (*HOST_FACTS, *GPU_FACTS, *ROUTER_FACTS))

# The metric name, kind and labels of a series.
_Key = tuple[str, Kind, Labels]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSnapshot:
    """All metrics at the Unix time `at`; `bins` are those of exponential histograms.

    `conventional` are those with the names of OpenTelemetry's conventions.
    `engines_started_at` has the Unix start time of each engine's process, if it is known.
    """

    at: float
    families: Iterable[Family]
    bins: BinsOf
    engines_started_at: Mapping[str, float]
    conventional: Iterable[SeriesFamily] = ()


class ExportRequests:
    """Builds one request after the other. Not for several threads.

    If a series is gone since the request before, the request has a point that ends the series:
    else a receiver would show its last value for some time.
    """

    def __init__(
        self, resource: Mapping[str, str], version: str, started_at: float, max_buckets: int
    ) -> None:
        """`started_at` is the Unix time when the agent began to count."""
        self._resource = Resource(attributes=attributes(resource.items()))
        self._scope = InstrumentationScope(name=SCOPE, version=version)
        self._started_ns = nanoseconds(started_at)
        self._max_buckets = max_buckets
        self._before: frozenset[_Key] = frozenset()
        self._exponential: frozenset[_Key] = frozenset()

    def request(self, metrics: MetricsSnapshot) -> ExportMetricsServiceRequest:
        """The request with these metrics."""
        request = _Request(metrics, self._started_ns, self._max_buckets)
        for family in metrics.families:
            request.add(family.name, series_of(family))
        for conventional in metrics.conventional:
            request.add(conventional.name, conventional)
        for key in self._before - request.keys:
            request.end(*key, exponential=key in self._exponential)
        self._before, self._exponential = frozenset(request.keys), frozenset(request.exponential)
        scope = ScopeMetrics(scope=self._scope, metrics=request.metrics.values())
        of_agent = ResourceMetrics(resource=self._resource, scope_metrics=[scope])
        return ExportMetricsServiceRequest(resource_metrics=[of_agent])


class _Request:
    """The metrics of one request while it is built."""

    def __init__(self, snapshot: MetricsSnapshot, started_ns: int, max_buckets: int) -> None:
        self._snapshot = snapshot
        self._read_ns = nanoseconds(snapshot.at)
        self._started_ns = started_ns
        self._max_buckets = max_buckets
        self.metrics: dict[str, Metric] = {}
        self.keys: set[_Key] = set()
        self.exponential: set[_Key] = set()

    def add(self, declared: str, family: SeriesFamily) -> None:
        """Add a family; `declared` is the name under which the catalog declares its metric."""
        metric = Metric(name=family.name, description=family.help, unit=_UNITS[declared])
        for series in family.series:
            self._point(metric, declared, family.kind, series)
            self.keys.add((family.name, family.kind, series.labels))
        self.metrics[family.name] = metric

    def _point(self, metric: Metric, declared: str, kind: Kind, series: PushedSeries) -> None:
        if kind is Kind.GAUGE:
            times = Times(self._read_ns)
            metric.gauge.data_points.append(number_point(series.labels, times, series.value))
            return
        times = Times(self._read_ns, self._began_ns(declared, series.labels))
        if kind is Kind.COUNTER:
            metric.sum.is_monotonic = True
            metric.sum.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
            metric.sum.data_points.append(number_point(series.labels, times, series.value))
        elif series.buckets is not None:
            self._histogram(metric, series, times)

    def _histogram(self, metric: Metric, series: PushedSeries, times: Times) -> None:
        labels, buckets = series.labels, series.buckets
        assert buckets is not None
        bins = series.bins
        if bins is None:
            bins = self._snapshot.bins.get((metric.name, tuple(value for _, value in labels)))
        if bins is None:
            metric.histogram.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
            metric.histogram.data_points.append(explicit_point(labels, times, buckets))
        else:
            point = exponential_point(labels, times, buckets, bins, self._max_buckets)
            metric.exponential_histogram.aggregation_temporality = (
                AGGREGATION_TEMPORALITY_CUMULATIVE
            )
            metric.exponential_histogram.data_points.append(point)
            self.exponential.add((metric.name, Kind.HISTOGRAM, labels))

    def _began_ns(self, declared: str, labels: Labels) -> int:
        if declared in _OF_MACHINES:
            return 0
        if declared not in _OF_ENGINES:
            return self._started_ns
        started_at = self._snapshot.engines_started_at.get(dict(labels)["engine"])
        # The engine's clock may be ahead of the agent's; then the start counts as unknown.
        is_known = started_at is not None and started_at <= self._snapshot.at
        return nanoseconds(started_at) if is_known and started_at is not None else 0

    def end(self, name: str, kind: Kind, labels: Labels, *, exponential: bool) -> None:
        """Add the point that ends a series; `exponential` is of a histogram."""
        metric = self.metrics.setdefault(name, Metric(name=name))
        if kind is Kind.GAUGE:
            metric.gauge.data_points.append(ended_point(labels, self._read_ns))
        elif kind is Kind.COUNTER:
            metric.sum.is_monotonic = True
            metric.sum.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
            metric.sum.data_points.append(ended_point(labels, self._read_ns))
        elif exponential:
            metric.exponential_histogram.aggregation_temporality = (
                AGGREGATION_TEMPORALITY_CUMULATIVE
            )
            ended = ended_exponential(labels, self._read_ns)
            metric.exponential_histogram.data_points.append(ended)
        else:
            metric.histogram.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
            metric.histogram.data_points.append(ended_histogram(labels, self._read_ns))


_LOG = logging.getLogger(__name__)

PATH = "/v1/metrics"
# Five minutes of exports. Counters catch up by themselves, only gauges lose values.
MAX_WAITING = 20
# This level saves most of what gzip can save, in a fifth of the time of its default.
_GZIP_LEVEL = 1


class PushCounter(ForwardCounter, Protocol):
    """Counts exports, and the points in them that the endpoint refused."""

    def points_rejected(self, points: int) -> None:
        """Count points that the endpoint left out of an export that it accepted."""


@dataclass(frozen=True, slots=True)
class Export:
    """The body of an export."""

    content: bytes
    gzipped: bool
    content_type: str = PROTOBUF


class MetricsPush:
    """Queues an export of all metrics at each call; a thread of its own sends them."""

    def __init__(
        self,
        settings: OtlpMetricsSettings,
        endpoint: str,
        read: Callable[[float], MetricsSnapshot],
        requests: ExportRequests,
        counter: PushCounter,
        *,
        proxy: str | None = None,
        ca: Path | None = None,
    ) -> None:
        """`read` returns all metrics; its argument is the Unix time now."""
        self._lock = threading.Lock()
        self._read = read
        self._requests = requests
        self._gzipped = settings.compression == "gzip"
        self._counter = counter
        to = HttpDestination(
            endpoint,
            path=PATH,
            headers={name: value.get_secret_value() for name, value in settings.headers.items()},
            timeout_s=settings.timeout,
            proxy=proxy,
            ca=ca,
            on_accepted=self._count_rejected,
        )
        self.forwarder = Forwarder(to, counter, name="metrics-push", max_bodies=MAX_WAITING)

    def push(self, now: float) -> None:
        """Queue an export of the metrics at this Unix time; never waits for the network."""
        # The last push of a stopping agent may run while its job pushes.
        with self._lock:
            content = self._requests.request(self._read(now)).SerializeToString()
        if self._gzipped:
            content = gzip.compress(content, _GZIP_LEVEL)
        self.forwarder.forward(Export(content, self._gzipped))

    def _count_rejected(self, response: bytes) -> None:
        """Count the points that a partial success left out: OTLP forbids to send them again."""
        try:
            partial = ExportMetricsServiceResponse.FromString(response).partial_success
        except DecodeError:
            # Some endpoints respond with a text.
            return
        if partial.rejected_data_points > 0:
            _LOG.warning("metrics that the endpoint refused: %s", partial.error_message)
            self._counter.points_rejected(partial.rejected_data_points)
