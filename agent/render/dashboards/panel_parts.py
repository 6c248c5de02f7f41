"""The parts of a dashboard as plain data, and the queries and styles that panels share."""

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import Any

from agent.catalog.metric import Kind, Metric
from agent.render.promql import (
    PLACE_LABELS,
    TARGET_LABELS,
    Matcher,
    buckets_of,
    by,
    count_of,
    published_labels,
    sum_of,
    value_of,
)


@dataclass(frozen=True, slots=True)
class PanelStyle:
    """A kind of panel. `lines` panels draw their thresholds as lines."""

    plugin: str
    options: Mapping[str, Any] = field(default_factory=dict)
    custom: Mapping[str, Any] = field(default_factory=dict)
    lines: bool = False
    format: str = "time_series"


_REDUCED = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_LEGEND = {
    "showLegend": True,
    "displayMode": "table",
    "placement": "bottom",
    "calcs": ["lastNotNull", "max"],
}
_TOOLTIP = {"mode": "multi", "sort": "desc"}
_LINE = {
    "drawStyle": "line",
    "lineWidth": 1,
    "fillOpacity": 8,
    "showPoints": "auto",
    "spanNulls": False,
}

_GRAPH = {"legend": _LEGEND, "tooltip": _TOOLTIP}

LINES = PanelStyle("timeseries", _GRAPH, _LINE, lines=True)
STACKED = PanelStyle(
    "timeseries",
    _GRAPH,
    {**_LINE, "fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}},
)
SHARES = PanelStyle(
    "timeseries",
    _GRAPH,
    {**_LINE, "fillOpacity": 60, "stacking": {"mode": "percent", "group": "A"}},
)
STAT = PanelStyle(
    "stat",
    {
        "reduceOptions": _REDUCED,
        "colorMode": "background",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": "auto",
        "wideLayout": True,
    },
)
BARS = PanelStyle(
    "bargauge",
    {
        "reduceOptions": {**_REDUCED, "values": True},
        "orientation": "horizontal",
        "displayMode": "basic",
        "valueMode": "color",
        "showUnfilled": True,
        "minVizWidth": 8,
        "minVizHeight": 16,
    },
)
STATES = PanelStyle(
    "state-timeline",
    {
        "mergeValues": True,
        "showValue": "auto",
        "alignValue": "left",
        "rowHeight": 0.8,
        "legend": {"showLegend": False, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
    },
    {"fillOpacity": 70, "lineWidth": 0},
)
HEATMAP = PanelStyle(
    "heatmap",
    {
        "calculate": False,
        "cellGap": 1,
        "color": {
            "mode": "scheme",
            "scheme": "Oranges",
            "steps": 64,
            "reverse": False,
            "fill": "dark-orange",
            "exponent": 0.5,
        },
        "exemplars": {"color": "rgba(31,120,193,0.9)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "tooltip": {"mode": "single", "showColorScale": True, "yHistogram": False},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": "s"},
    },
    format="heatmap",
)
TABLE = PanelStyle(
    "table",
    {"showHeader": True, "cellHeight": "sm"},
    {"align": "auto", "inspect": False},
    format="table",
)
POINTS = PanelStyle(
    "xychart",
    {
        "mapping": "auto",
        "series": [],
        "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
    },
    {"show": "points", "pointSize": {"fixed": 8}},
    format="table",
)


class PanelUnit(StrEnum):
    """A unit as Grafana names it in `valueFormats/categories.ts`."""

    SECONDS = "s"
    MILLISECONDS = "ms"
    SHARE = "percentunit"
    NUMBER = "short"
    REQUESTS_PER_S = "reqps"
    PER_SECOND = "cps"
    PER_MINUTE = "cpm"
    OPERATIONS_PER_S = "ops"
    BYTES = "bytes"
    BYTES_PER_S = "Bps"
    FLOPS = "flops"
    WATTS = "watt"
    JOULES = "joule"
    CELSIUS = "celsius"
    HERTZ = "hertz"
    DOLLARS = "currencyUSD"
    DATE = "dateTimeAsIso"
    TEXT = "string"


@dataclass(frozen=True, slots=True)
class Query:
    """A query to Prometheus. An `instant` one returns the value at the end of the time range."""

    expression: str
    legend: str
    _: KW_ONLY
    instant: bool = False
    exemplars: bool = False


@dataclass(frozen=True, slots=True)
class Sql:
    """A query to PostgreSQL with Grafana's macros."""

    statement: str
    over_time: bool = False


class ApiType(StrEnum):
    """The type of a column as Grafana's Infinity data source names it."""

    TEXT = "string"
    NUMBER = "number"
    TIMESTAMP = "timestamp"


@dataclass(frozen=True, slots=True)
class ApiColumn:
    """A column of a table: the path of its value in each item, as `ttft_ms.p95`, and its name."""

    selector: str
    name: str
    type: ApiType = ApiType.TEXT


@dataclass(frozen=True, slots=True)
class Api:
    """A query of the agent's API: a table of the items that its response has under `root`."""

    path: str
    params: Mapping[str, str]
    root: str
    columns: tuple[ApiColumn, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """A link on a value."""

    title: str
    url: str


def dashboard_url(uid: str, **variables: str) -> str:
    """Another dashboard with the time range, data source, agents and model of this one."""
    kept = (f"${{{name}:queryparam}}" for name in ("prometheus_datasource", *AGENT, "model"))
    chosen = (f"var-{name}={value}" for name, value in variables.items())
    return f"/d/{uid}?{'&'.join(('${__url_time_range}', *kept, *chosen))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """The colour of all values from `value` on; None stands below every number."""

    value: float | None
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Settings of one column or series that differ from its panel.

    A `coloured` column takes its colour from its own thresholds, or from the panel's. A `hidden`
    column only holds values for links. `texts` replace values.
    """

    name: str
    unit: PanelUnit | None = None
    links: tuple[Link, ...] = ()
    coloured: bool = False
    hidden: bool = False
    thresholds: tuple[Threshold, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel, `width` of the dashboard's 24 columns wide."""

    title: str
    description: str
    unit: PanelUnit
    queries: tuple[Query, ...] | tuple[Sql, ...] | tuple[Api, ...]
    _: KW_ONLY
    style: PanelStyle = LINES
    width: int = 8
    height: int = 8
    thresholds: tuple[Threshold, ...] = ()
    lowest: float | None = 0
    highest: float | None = None
    links: tuple[Link, ...] = ()
    columns: tuple[Column, ...] = ()
    transformations: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class PanelRow:
    """Panels under a heading. The first rows of a dashboard are open, the others collapsed."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One dashboard. Its queries use its variables."""

    uid: str
    title: str
    description: str
    rows: tuple[PanelRow, ...]
    variables: tuple[Mapping[str, Any], ...]
    annotations: tuple[Mapping[str, Any], ...] = field(default=())
    hours: int = 1


def warn_above(value: float, colour: str = "red") -> tuple[Threshold, ...]:
    """Green below a value, another colour from there on."""
    return Threshold(value=None, colour="green"), Threshold(value=value, colour=colour)


def good_above(value: float) -> tuple[Threshold, ...]:
    """Red below a value, green from there on."""
    return Threshold(value=None, colour="red"), Threshold(value=value, colour="green")


# The variables of dashboards that are labels of series. Each narrows the values of the next ones.
VARIABLES = (*PLACE_LABELS, *TARGET_LABELS, "engine", "model", "objective", "gpu")

# The variables that identify an agent.
AGENT = (*PLACE_LABELS, *TARGET_LABELS)

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
    """A part over its whole; no value if the whole is 0."""
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
