"""The points of an export, flat, and requests made of a meter."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from agent.outputs.otlp_metrics.export_requests import ExportRequests, MetricsSnapshot
from agent.outputs.prometheus.agent_exposition import AgentExposition
from agent.outputs.prometheus.hosts import HostBoard
from agent.outputs.prometheus.meter import Meter
from tests.outputs.prometheus.filled import HOST_SAMPLE, INFO
from tests.records.making import NOON

STARTED_AT = NOON - 3600.0
RESOURCE = {"service.name": "goodput-agent", "service.instance.id": "agent-0"}


@dataclass(frozen=True, slots=True)
class Pushed:
    """One point, its metric and its kind."""

    metric: Metric
    kind: str
    labels: Mapping[str, str]
    point: Any


def request_of(
    meter: Meter,
    requests: ExportRequests | None = None,
    *,
    at: float = NOON,
    engines_started_at: Mapping[str, float] | None = None,
    max_buckets: int = 160,
) -> ExportMetricsServiceRequest:
    """The export of a meter, of a new agent where `requests` is None; serialised and parsed."""
    hosts = HostBoard()
    hosts.sample("chat-0", HOST_SAMPLE)
    snapshot = meter.snapshot()
    given = MetricsSnapshot(
        at=at,
        families=AgentExposition(meter, INFO, hosts=hosts).families(snapshot),
        bins={
            (metric.name, labels): values.bins
            for (metric, labels), values in snapshot.histograms.items()
            if values.bins is not None
        },
        engines_started_at=engines_started_at or {},
    )
    made = requests or requests_of_agent(max_buckets)
    return ExportMetricsServiceRequest.FromString(made.request(given).SerializeToString())


def requests_of_agent(max_buckets: int = 160) -> ExportRequests:
    """The requests of an agent that began to count at STARTED_AT."""
    return ExportRequests(RESOURCE, "1.2.3", STARTED_AT, max_buckets)


def points_of(request: ExportMetricsServiceRequest) -> Sequence[Pushed]:
    """All points."""
    return list(_points(request))


def _points(request: ExportMetricsServiceRequest) -> Iterator[Pushed]:
    (resource,) = request.resource_metrics
    (scope,) = resource.scope_metrics
    for metric in scope.metrics:
        kind = metric.WhichOneof("data")
        assert kind is not None
        for point in getattr(metric, kind).data_points:
            labels = {pair.key: pair.value.string_value for pair in point.attributes}
            yield Pushed(metric, kind, labels, point)


def point(request: ExportMetricsServiceRequest, name: str, **labels: str) -> Pushed:
    """The only point of this name with these labels."""
    (found,) = [
        pushed
        for pushed in points_of(request)
        if pushed.metric.name == name and labels.items() <= pushed.labels.items()
    ]
    return found
