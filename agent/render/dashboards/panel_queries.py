"""PromQL for panels: series selected by the dashboard variables, and common queries."""

from collections.abc import Iterable

from agent.catalog.metric import Kind, Metric
from agent.render.dashboards.panel_parts import Query
from agent.render.promql import (
    Matcher,
    buckets_of,
    by,
    count_of,
    published_labels,
    sum_of,
    value_of,
)

# The variables of dashboards that are labels of series. Each narrows the values of the next ones.
VARIABLES = ("job", "instance", "engine", "model", "objective", "gpu")

# The variables that identify an agent.
AGENT = VARIABLES[:2]

# Grafana's macros: a window that is safe for rate(), and the whole time range of the dashboard.
RATE = "$__rate_interval"
SHOWN = "$__range"

ENGINE = ("engine",)
ENGINE_MODEL = ("engine", "model")
OBJECTIVE = ("objective",)
OBJECTIVE_MODEL = ("objective", "model")
GPU = ("gpu",)

_PERCENTILES = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))


def _matching(names: Iterable[str]) -> tuple[Matcher, ...]:
    return tuple(Matcher(name, f'{name}=~"${name}"') for name in names)


def _selected(metric: Metric, matchers: Iterable[Matcher]) -> tuple[Matcher, ...]:
    own = published_labels(metric)
    return (*_matching(name for name in VARIABLES if name in own), *matchers)


def gauge(metric: Metric, *matchers: Matcher) -> str:
    """The selected series of a gauge."""
    return value_of(metric, *_selected(metric, matchers))


def of_agents(metric: Metric) -> str:
    """The series of the selected agents, of any engine or GPU."""
    return value_of(metric, *_matching(AGENT))


def rate(metric: Metric, *matchers: Matcher) -> str:
    """A counter's increase per second."""
    return f"rate({value_of(metric, *_selected(metric, matchers))}[{RATE}])"


def increase(metric: Metric, window: str, *matchers: Matcher) -> str:
    """A counter's increase over a window."""
    return f"increase({value_of(metric, *_selected(metric, matchers))}[{window}])"


def buckets(metric: Metric, *matchers: Matcher) -> str:
    """The increase per second of a histogram's buckets."""
    return f"rate({buckets_of(metric, *_selected(metric, matchers))}[{RATE}])"


def observed(metric: Metric, *matchers: Matcher) -> str:
    """A histogram's observations per second."""
    return f"rate({count_of(metric, *_selected(metric, matchers))}[{RATE}])"


def summed(metric: Metric) -> str:
    """The increase per second of the sum of a histogram's observations."""
    return f"rate({sum_of(metric, *_selected(metric, ()))}[{RATE}])"


def quantile(share: float, metric: Metric, labels: Iterable[str]) -> str:
    """A percentile of a histogram by labels: an estimate between two bucket edges."""
    return f"histogram_quantile({share}, {by((*labels, 'le'), buckets(metric))})"


def ratio(part: str, whole: str) -> str:
    """A part over its whole; no value where the whole is 0."""
    return f"{part}\n  / ({whole} > 0)"


def legend(labels: Iterable[str], what: str = "") -> str:
    """The values of the labels, then `what`."""
    return " ".join((*(f"{{{{{label}}}}}" for label in labels), *((what,) if what else ())))


def sum_by(labels: tuple[str, ...], metric: Metric, what: str = "") -> Query:
    """The sum of a gauge, or of a counter per second, by labels."""
    return _aggregated("sum", labels, metric, what)


def max_by(labels: tuple[str, ...], metric: Metric, what: str = "", *matchers: Matcher) -> Query:
    """The highest value of a gauge, or of a counter per second, by labels."""
    return _aggregated("max", labels, metric, what, *matchers)


def _aggregated(
    how: str, labels: tuple[str, ...], metric: Metric, what: str, *matchers: Matcher
) -> Query:
    read = rate if metric.kind is Kind.COUNTER else gauge
    return Query(by(labels, read(metric, *matchers), how), legend(labels, what))


def total(metric: Metric, name: str) -> Query:
    """The sum of a gauge, or of a counter per second, over all series."""
    read = rate if metric.kind is Kind.COUNTER else gauge
    return Query(f"sum({read(metric)})", name)


def by_engine(metric: Metric, what: str = "") -> Query:
    """The sum of a gauge, or of a counter per second, by engine and model."""
    return sum_by(ENGINE_MODEL, metric, what)


def per_engine(expression: str, what: str = "") -> Query:
    """An expression that has a value for each engine and model."""
    return Query(expression, legend(ENGINE_MODEL, what))


def percentiles(
    metric: Metric, labels: tuple[str, ...], before: str = "", *, traces: bool = False
) -> tuple[Query, ...]:
    """p50, p95 and p99 of a histogram; `traces` shows exemplars of single requests at p99."""
    return tuple(
        Query(
            quantile(share, metric, labels),
            f"{before}{name}",
            exemplars=traces and name == "p99",
        )
        for share, name in _PERCENTILES
    )
