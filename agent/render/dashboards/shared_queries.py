"""Questions that many panels share."""

from collections.abc import Iterable

from agent.catalog.metric import Kind, Metric
from agent.render.dashboards.panel_expressions import ENGINE_MODEL, gauge, quantile, rate
from agent.render.dashboards.panel_parts import Query
from agent.render.promql import by

ENGINE_NAME = "{{engine}} {{model}}"

_PERCENTILES = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))


def percentiles(
    metric: Metric, labels: tuple[str, ...], before: str = "", *, traces: bool = False
) -> tuple[Query, ...]:
    """p50, p95 and p99 of a histogram; `traces` shows single requests with the highest."""
    return tuple(
        Query(
            expression=quantile(share, metric, labels),
            legend=f"{before}{name}",
            exemplars=traces and name == "p99",
        )
        for share, name in _PERCENTILES
    )


def by_engine(metric: Metric, what: str) -> Query:
    """A gauge, or a counter per second, by engine and model."""
    shape = rate if metric.kind is Kind.COUNTER else gauge
    return Query(
        expression=by(ENGINE_MODEL, shape(metric)), legend=f"{ENGINE_NAME} {what}".rstrip()
    )


def sum_by(labels: Iterable[str], expression: str) -> Query:
    """A sum by labels, named by them."""
    labels = tuple(labels)
    return Query(
        expression=by(labels, expression),
        legend=" ".join(f"{{{{{label}}}}}" for label in labels),
    )


def named_point(expression: str, *labels: str) -> str:
    """The expression with one label that tells the others, to join points of a plot by."""
    quoted = ", ".join(f'"{label}"' for label in labels)
    return f'label_join({expression}, "point", " ", {quoted})'
