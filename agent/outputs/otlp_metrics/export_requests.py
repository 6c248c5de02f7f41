"""Export requests of OTLP with all metrics.

Names, units and kinds are the ones that the Prometheus receiver of a collector makes of `/metrics`:
names are the same as there, with the `_total` of a counter. A receiver that would add a unit or
`_total` to a name finds it there already, so every receiver has the names of `/metrics`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE,
    Metric,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from prometheus_client.core import Metric as Family

from agent.catalog.efficiency_metrics import EFFICIENCY_METRICS
from agent.catalog.engine_facts import ENGINE_FACTS
from agent.catalog.gpu_facts import GPU_FACTS
from agent.catalog.host_facts import HOST_FACTS
from agent.catalog.metric import Kind, Unit
from agent.catalog.metrics import AGENT_METRICS
from agent.outputs.otlp_metrics.points import (
    Times,
    attributes,
    ended_exponential,
    ended_histogram,
    ended_point,
    explicit_point,
    exponential_point,
    nanoseconds,
    number_point,
)
from agent.outputs.otlp_metrics.series import BinsOf, Labels, PushedSeries, SeriesFamily, series_of

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
    for metric in (*AGENT_METRICS, *EFFICIENCY_METRICS, *ENGINE_FACTS, *HOST_FACTS, *GPU_FACTS)
}
# Counters of these metrics began with the engine's process.
_OF_ENGINES = frozenset(fact.name for fact in ENGINE_FACTS)
# Counters of these began with a driver, a container or a process whose start is unknown.
_OF_MACHINES = frozenset(fact.name for fact in (*HOST_FACTS, *GPU_FACTS))

# The metric name, kind and labels of a series.
_Key = tuple[str, Kind, Labels]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSnapshot:
    """All metrics at the Unix time `at`; `bins` are those of exponential histograms.

    `engines_started_at` has the Unix start time of each engine's process, where it is known.
    """

    at: float
    families: Iterable[Family]
    bins: BinsOf
    engines_started_at: Mapping[str, float]


class ExportRequests:
    """Builds one request after the other. Not for several threads.

    Where a series is gone since the request before, the request has a point that ends the series:
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
