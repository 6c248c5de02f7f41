"""PromQL for panels: series narrowed to what the dashboard's variables chose."""

from collections.abc import Iterable

from agent.catalog.metric import Metric
from agent.render.promql import (
    Matcher,
    buckets_of,
    by,
    count_of,
    published_labels,
    sum_of,
    value_of,
)

# The variables of dashboards that are labels of series, in the order in which they narrow down.
CHOSEN = ("job", "instance", "engine", "model", "objective", "gpu")

# Of these, what tells agents apart.
AGENT = CHOSEN[:2]

RATE = "$__rate_interval"
SHOWN = "$__range"

ENGINE = ("engine",)
ENGINE_MODEL = ("engine", "model")
OBJECTIVE = ("objective",)
OBJECTIVE_MODEL = ("objective", "model")
GPU = ("gpu",)


def _chosen(metric: Metric, matchers: Iterable[Matcher]) -> tuple[Matcher, ...]:
    given = tuple(matchers)
    own = published_labels(metric)
    return (
        *(Matcher(name, f'{name}=~"${name}"') for name in CHOSEN if name in own),
        *given,
    )


def gauge(metric: Metric, *matchers: Matcher) -> str:
    """The chosen series of a gauge."""
    return value_of(metric, *_chosen(metric, matchers))


def of_agents(metric: Metric) -> str:
    """The series of the chosen agents, of whatever engine or GPU."""
    return value_of(metric, *(Matcher(name, f'{name}=~"${name}"') for name in AGENT))


def rate(metric: Metric, *matchers: Matcher) -> str:
    """A counter's increase per second."""
    return f"rate({value_of(metric, *_chosen(metric, matchers))}[{RATE}])"


def increase(metric: Metric, window: str, *matchers: Matcher) -> str:
    """A counter's increase over a window."""
    return f"increase({value_of(metric, *_chosen(metric, matchers))}[{window}])"


def buckets(metric: Metric, *matchers: Matcher) -> str:
    """The increase per second of a histogram's buckets."""
    return f"rate({buckets_of(metric, *_chosen(metric, matchers))}[{RATE}])"


def observed(metric: Metric, *matchers: Matcher) -> str:
    """A histogram's observations per second."""
    return f"rate({count_of(metric, *_chosen(metric, matchers))}[{RATE}])"


def quantile(share: float, metric: Metric, labels: Iterable[str]) -> str:
    """A percentile of a histogram by labels; it lies between edges and is an estimate."""
    return f"histogram_quantile({share}, {by((*labels, 'le'), buckets(metric))})"


def summed(metric: Metric) -> str:
    """The increase per second of the sum of a histogram's observations."""
    return f"rate({sum_of(metric, *_chosen(metric, ()))}[{RATE}])"


def ratio(part: str, whole: str) -> str:
    """A part over its whole; nothing where there is no whole."""
    return f"{part}\n  / ({whole} > 0)"
