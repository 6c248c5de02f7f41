"""Metric families of counters and gauges for prometheus_client."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family

from agent.catalog.metric import Kind, Metric

__all__ = ["Family", "family_of"]

_FAMILIES = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily}


def family_of(
    metric: Metric, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
) -> Family:
    """The family of a counter or a gauge with these labels and values."""
    family: Family = _FAMILIES[metric.kind](metric.name, metric.help, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)  # type: ignore[attr-defined]
    return family
