"""Variables of dashboards in the format of Grafana's templating."""

from collections.abc import Mapping
from typing import Any

from agent.catalog import gpu_facts
from agent.catalog import metrics as m
from agent.catalog.metric import Metric
from agent.render.dashboards.panel_queries import VARIABLES
from agent.render.promql import Matcher, value_of

PROMETHEUS = {"type": "prometheus", "uid": "${prometheus_datasource}"}
POSTGRES = {"type": "grafana-postgresql-datasource", "uid": "${postgres_datasource}"}

# The metric whose label values a variable offers.
_METRICS: Mapping[str, Metric] = {
    "job": m.AGENT_INFO,
    "instance": m.AGENT_INFO,
    "engine": m.REQUESTS,
    "model": m.REQUESTS,
    "objective": m.SLO_TARGET,
    "gpu": gpu_facts.UP,
}
# The variables that restrict the values of a variable; the others: job and instance.
_NARROWED: Mapping[str, tuple[str, ...]] = {
    "job": (),
    "instance": ("job",),
    "model": ("job", "instance", "engine"),
}
_LABELS = {"gpu": "GPU"}

_ON_TIME_CHANGE = 2
_LABEL_VALUES = 1
_ALPHABETICAL = 1
_ALL = {"text": ["All"], "value": ["$__all"]}


def source(query: str, label: str) -> dict[str, Any]:
    """A choice of a data source; Grafana's linter requires this form of name."""
    return {
        "name": f"{query}_datasource",
        "label": f"{label} data source",
        "type": "datasource",
        "query": query,
        "regex": "",
        "hide": 0,
        "refresh": 1,
        "multi": False,
        "includeAll": False,
        "options": [],
    }


PROMETHEUS_SOURCE = source("prometheus", "Prometheus")
# The plugin's older name, an alias: the newer one cannot be part of a variable's name.
POSTGRES_SOURCE = source("postgres", "Postgres")
JAEGER_SOURCE = source("jaeger", "Jaeger")
TEMPO_SOURCE = source("tempo", "Tempo")


def _query(name: str, label: str, datasource: Mapping[str, str], query: Any) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": dict(datasource),
        "definition": query if isinstance(query, str) else query["query"],
        "query": query,
        "refresh": _ON_TIME_CHANGE,
        "sort": _ALPHABETICAL,
        "regex": "",
        "hide": 0,
        "multi": True,
        "includeAll": True,
        "current": _ALL,
        "options": [],
    }


def of_label(name: str) -> dict[str, Any]:
    """A choice of values of a label in Prometheus."""
    narrowed = _NARROWED.get(name, ("job", "instance"))
    matchers = (Matcher(label, f'{label}=~"${label}"') for label in narrowed)
    label_values = {
        "query": f"label_values({value_of(_METRICS[name], *matchers)}, {name})",
        "refId": "PrometheusVariableQueryEditor-VariableQuery",
        "qryType": _LABEL_VALUES,
    }
    label = _LABELS.get(name, name.title())
    return {**_query(name, label, PROMETHEUS, label_values), "allValue": ".+"}


def of_sql(name: str, statement: str) -> dict[str, Any]:
    """A choice of several values that a statement returns; `All` is sent as the list of all."""
    return _query(name, name.title(), POSTGRES, statement)


def one_of_sql(name: str, statement: str) -> dict[str, Any]:
    """A choice of one of the values that a statement returns."""
    plain = _query(name, name.title(), POSTGRES, statement)
    return {**plain, "multi": False, "includeAll": False, "current": {}}


def custom(name: str, label: str, values: tuple[str, ...]) -> dict[str, Any]:
    """A choice of one of these values; the default is the first."""
    return {
        "name": name,
        "label": label,
        "type": "custom",
        "query": ",".join(values),
        "hide": 0,
        "multi": False,
        "includeAll": False,
        "current": {"text": values[0], "value": values[0], "selected": True},
        "options": [
            {"text": value, "value": value, "selected": value == values[0]} for value in values
        ],
    }


def textbox(name: str, label: str) -> dict[str, Any]:
    """A text field."""
    nothing = {"text": "", "value": "", "selected": True}
    return {
        "name": name,
        "label": label,
        "type": "textbox",
        "query": "",
        "hide": 0,
        "current": nothing,
        "options": [nothing],
    }


def used_in(expressions: str) -> tuple[dict[str, Any], ...]:
    """The variables of a dashboard on Prometheus with these expressions."""
    labels = (of_label(name) for name in VARIABLES if f'"${name}"' in expressions)
    return PROMETHEUS_SOURCE, *labels
