"""A dashboard as Grafana's JSON, in schema version 39 for Grafana 11 and newer."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

from agent.catalog import gpu_facts
from agent.catalog import metrics as m
from agent.catalog.metric import Metric
from agent.render.alerts.agent_alerts import WATCHDOG
from agent.render.alerts.objective_alerts import MUTING
from agent.render.dashboards.panel_parts import (
    AGENT,
    GPU,
    RATE,
    VARIABLES,
    Api,
    Column,
    Dashboard,
    Link,
    Panel,
    PanelRow,
    Query,
    Sql,
    Threshold,
    increase,
    of_agents,
)
from agent.render.dashboards.request_sql import EVENTS as EVENTS_SQL
from agent.render.promql import PLACE_LABELS, Matcher, by, value_of

PROMETHEUS = {"type": "prometheus", "uid": "${prometheus_datasource}"}
POSTGRES = {"type": "grafana-postgresql-datasource", "uid": "${postgres_datasource}"}

# The metric whose label values a variable offers.
_METRICS: Mapping[str, Metric] = {
    "cluster": m.AGENT_INFO,
    "namespace": m.AGENT_INFO,
    "job": m.AGENT_INFO,
    "instance": m.AGENT_INFO,
    "engine": m.REQUESTS,
    "model": m.REQUESTS,
    "objective": m.SLO_TARGET,
    "gpu": gpu_facts.UP,
}
# The variables that restrict the values of a variable; the others: those that identify an agent.
_NARROWED: Mapping[str, tuple[str, ...]] = {
    **{name: AGENT[:place] for place, name in enumerate(AGENT)},
    "model": (*AGENT, "engine"),
}
# `All` has the requests of an unknown model, too.
_CHOICES = {"model": (Matcher("model", f'model!="{m.UNKNOWN}"'),)}
_LABELS = {"gpu": "GPU"}

INFINITY = {"type": "yesoreyeram-infinity-datasource", "uid": "${datasource}"}
_SOURCES = {
    PROMETHEUS["type"]: "Prometheus",
    POSTGRES["type"]: "PostgreSQL",
    INFINITY["type"]: "Infinity",
}

_ON_TIME_CHANGE = 2
_LABEL_VALUES = 1
_ALPHABETICAL = 1
_ALL = {"text": ["All"], "value": ["$__all"]}


def source_variable(query: str, label: str) -> dict[str, Any]:
    """A choice of a data source; Grafana's linter requires this form of name."""
    return _source_variable(f"{query}_datasource", f"{label} data source", query)


def _source_variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "datasource",
        "query": query,
        "regex": "",
        "hide": 0,
        "refresh": 1,
        "multi": False,
        "includeAll": False,
        "options": [],
    }


PROMETHEUS_SOURCE = source_variable("prometheus", "Prometheus")
# The plugin's older name, an alias: the newer one cannot be part of a variable's name.
POSTGRES_SOURCE = source_variable("postgres", "Postgres")
JAEGER_SOURCE = source_variable("jaeger", "Jaeger")
TEMPO_SOURCE = source_variable("tempo", "Tempo")
# The only data source of its dashboard; the name of its plugin cannot be part of a variable's name.
INFINITY_SOURCE = _source_variable("datasource", "Data source", INFINITY["type"])


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


def label_variable(name: str) -> dict[str, Any]:
    """A choice of values of a label in Prometheus."""
    narrowed = _NARROWED.get(name, AGENT)
    matchers = (Matcher(label, f'{label}=~"${label}"') for label in narrowed)
    series = value_of(_METRICS[name], *matchers, *_CHOICES.get(name, ()))
    label_values = {
        "query": f"label_values({series}, {name})",
        "refId": "PrometheusVariableQueryEditor-VariableQuery",
        "qryType": _LABEL_VALUES,
    }
    label = _LABELS.get(name, name.title())
    # Series without these labels must be shown as well.
    everything = ".*" if name in PLACE_LABELS else ".+"
    return {**_query(name, label, PROMETHEUS, label_values), "allValue": everything}


def sql_variable(name: str, statement: str) -> dict[str, Any]:
    """A choice of several values that a statement returns; `All` is sent as the list of all."""
    return _query(name, name.title(), POSTGRES, statement)


def single_sql_variable(name: str, statement: str) -> dict[str, Any]:
    """A choice of one of the values that a statement returns."""
    plain = _query(name, name.title(), POSTGRES, statement)
    return {**plain, "multi": False, "includeAll": False, "current": {}}


def choice_variable(name: str, label: str, values: tuple[str, ...]) -> dict[str, Any]:
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


def text_variable(name: str, label: str) -> dict[str, Any]:
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


def variables_used_in(expressions: str) -> tuple[dict[str, Any], ...]:
    """The variables of a dashboard on Prometheus with these expressions."""
    labels = (label_variable(name) for name in VARIABLES if f'"${name}"' in expressions)
    return PROMETHEUS_SOURCE, *labels


BUILT_IN: Mapping[str, Any] = {
    "builtIn": 1,
    "datasource": {"type": "grafana", "uid": "-- Grafana --"},
    "enable": True,
    "hide": True,
    "iconColor": "rgba(0, 211, 255, 1)",
    "name": "Annotations & Alerts",
    "type": "dashboard",
}


def _annotation(name: str, colour: str, source: Mapping[str, str]) -> dict[str, Any]:
    return {
        "datasource": dict(source),
        "enable": True,
        "hide": False,
        "iconColor": colour,
        "name": name,
    }


def _prometheus_annotation(
    name: str, colour: str, expression: str, title: str, tags: str
) -> dict[str, Any]:
    return {
        **_annotation(name, colour, PROMETHEUS),
        "expr": expression,
        "step": "60s",
        "titleFormat": title,
        "textFormat": "",
        "tagKeys": tags,
    }


EVENTS = _prometheus_annotation(
    "Events",
    "orange",
    f"{increase(m.ENGINE_EVENTS, RATE)} > 0",
    "{{kind}} on {{engine}}",
    "engine,kind",
)
_SENT_TO_NOBODY = "|".join((WATCHDOG, *MUTING))
# By name, because an organisation may call its severities otherwise.
FIRING = f'ALERTS{{alertname=~"(Llm|Gpu).+",alertname!~"{_SENT_TO_NOBODY}",alertstate="firing"}}'
ALERTS = _prometheus_annotation(
    "Alerts",
    "red",
    FIRING,
    "{{alertname}}",
    "severity,objective,engine,gpu",
)
# The value is the time of the Xid: it is exact between scrapes, and present from the first Xid on.
XIDS = {
    **_prometheus_annotation(
        "Xids",
        "purple",
        f"1000 * {by((*GPU, 'xid'), of_agents(gpu_facts.XID_LAST_SEEN), 'max')}",
        "Xid {{xid}} on {{gpu}}",
        "gpu,xid",
    ),
    "useValueForTime": True,
}
STORED = {
    **_annotation("Events", "orange", POSTGRES),
    "target": {
        "refId": "Annotation",
        "editorMode": "code",
        "format": "table",
        "rawQuery": True,
        "rawSql": EVENTS_SQL,
    },
}

GRAFANA_VERSION = "11.0.0"
SCHEMA_VERSION = 39
COLUMNS = 24
TAG = "goodput-agent"

_ROW_HEIGHT = 1
# Grafana runs the queries of a collapsed row when it is opened.
_OPEN_ROWS = 2
# The style of a limit: a dashed red line.
_LIMIT = {
    "matcher": {"id": "byRegexp", "options": "/(limit|target|maximum)$/"},
    "properties": [
        {"id": "color", "value": {"mode": "fixed", "fixedColor": "red"}},
        {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [10, 10]}},
        {"id": "custom.lineWidth", "value": 2},
        {"id": "custom.fillOpacity", "value": 0},
        {"id": "custom.stacking", "value": {"mode": "none", "group": "limits"}},
    ],
}


def dashboard_text(dashboard: Dashboard) -> str:
    """The dashboard as the text of a file."""
    # A quarter of the text would be a wider indent, and a ConfigMap with all files holds 1 MiB.
    return json.dumps(dashboard_json(dashboard), indent=1, ensure_ascii=False) + "\n"


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    return {
        "__requires": list(_required(dashboard)),
        "id": None,
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": [TAG],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": f"now-{dashboard.hours}h", "to": "now"},
        "schemaVersion": SCHEMA_VERSION,
        "annotations": {
            "list": [dict(annotation) for annotation in (BUILT_IN, *dashboard.annotations)]
        },
        "templating": {"list": [dict(variable) for variable in dashboard.variables]},
        "links": [_links_to_others()],
        "panels": list(_placed(dashboard.rows)),
    }


def _required(dashboard: Dashboard) -> Iterator[dict[str, str]]:
    """Grafana and the plugins that the dashboard needs, as an export of Grafana names them."""
    yield {"type": "grafana", "id": "grafana", "name": "Grafana", "version": GRAFANA_VERSION}
    panels = [panel for row in dashboard.rows for panel in row.panels]
    for source in sorted({_source(query)["type"] for panel in panels for query in panel.queries}):
        yield {"type": "datasource", "id": source, "name": _SOURCES[source], "version": ""}
    for plugin in sorted({panel.style.plugin for panel in panels}):
        yield {"type": "panel", "id": plugin, "name": plugin.title(), "version": ""}


def _links_to_others() -> dict[str, Any]:
    """Links to the other dashboards that keep the time range and the variables."""
    return {
        "type": "dashboards",
        "title": "Goodput",
        "tags": [TAG],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def _placed(rows: tuple[PanelRow, ...]) -> Iterator[dict[str, Any]]:
    y = 0
    for row in rows[:_OPEN_ROWS]:
        panels = list(_flowing(row, y + _ROW_HEIGHT))
        yield _heading(row, y)
        yield from panels
        y = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    for row in rows[_OPEN_ROWS:]:
        yield _heading(row, y, list(_flowing(row, y + _ROW_HEIGHT)))
        y += _ROW_HEIGHT


def _heading(row: PanelRow, y: int, inside: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    return {
        "id": stable_id(f"row: {row.title}"),
        "type": "row",
        "title": row.title,
        "collapsed": bool(inside),
        "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": _ROW_HEIGHT},
        "panels": [*inside],
    }


def _flowing(row: PanelRow, y: int) -> Iterator[dict[str, Any]]:
    """The panels of a row from left to right; one that does not fit starts a new line."""
    x = line_height = 0
    for panel in row.panels:
        if x + panel.width > COLUMNS:
            x, y, line_height = 0, y + line_height, 0
        yield {**_panel(panel), "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height}}
        x, line_height = x + panel.width, max(line_height, panel.height)


def stable_id(title: str) -> int:
    """A number made from the title, so that a panel keeps its id when other panels change."""
    return crc32(title.encode()) % 1_000_000_000


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "id": stable_id(panel.title),
        "type": panel.style.plugin,
        "title": panel.title,
        "description": panel.description,
        "datasource": dict(_source(panel.queries[0])),
        "targets": list(_targets(panel)),
        "fieldConfig": {"defaults": _defaults(panel), "overrides": list(_overrides(panel))},
        "options": dict(panel.style.options),
        "transformations": [dict(step) for step in panel.transformations],
    }


def _source(query: Query | Sql | Api) -> Mapping[str, str]:
    if isinstance(query, Api):
        return INFINITY
    return PROMETHEUS if isinstance(query, Query) else POSTGRES


def _targets(panel: Panel) -> Iterator[dict[str, Any]]:
    queries: Sequence[Query | Sql | Api] = panel.queries
    for index, query in enumerate(queries):
        yield _target(panel, query, chr(ord("A") + index))


def _target(panel: Panel, query: Query | Sql | Api, name: str) -> dict[str, Any]:
    source = {"refId": name, "datasource": dict(_source(query))}
    if isinstance(query, Api):
        return {**source, **_of_api(query)}
    common = {**source, "editorMode": "code"}
    if isinstance(query, Sql):
        return {
            **common,
            "format": "time_series" if query.over_time else "table",
            "rawQuery": True,
            "rawSql": query.statement,
        }
    return {
        **common,
        "expr": query.expression,
        "legendFormat": query.legend,
        "format": panel.style.format,
        "range": not query.instant,
        "instant": query.instant,
        "exemplar": query.exemplars,
    }


def _of_api(query: Api) -> dict[str, Any]:
    """A query as Grafana's Infinity data source reads it."""
    params = [{"key": name, "value": value} for name, value in query.params.items()]
    return {
        "type": "json",
        "parser": "backend",
        "source": "url",
        "format": "table",
        "url": query.path,
        "url_options": {"method": "GET", "data": "", "params": params},
        "root_selector": query.root,
        "columns": [
            {"selector": column.selector, "text": column.name, "type": column.type.value}
            for column in query.columns
        ],
        "filters": [],
        "global_query_id": "",
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    custom = dict(panel.style.custom)
    if panel.thresholds and panel.style.lines:
        custom["thresholdsStyle"] = {"mode": "dashed"}
    bounds = {"min": panel.lowest, "max": panel.highest}
    return {
        "unit": panel.unit.value,
        **{name: value for name, value in bounds.items() if value is not None},
        "color": {"mode": "palette-classic" if panel.style.custom else "thresholds"},
        "thresholds": _steps(panel.thresholds or (Threshold(value=None, colour="green"),)),
        "custom": custom,
        "links": [_link(link) for link in panel.links],
    }


def _steps(thresholds: tuple[Threshold, ...]) -> dict[str, Any]:
    steps = [{"value": step.value, "color": step.colour} for step in thresholds]
    return {"mode": "absolute", "steps": steps}


def _overrides(panel: Panel) -> Iterator[dict[str, Any]]:
    if panel.style.plugin == "timeseries":
        yield _LIMIT
    for column in panel.columns:
        yield {
            "matcher": {"id": "byName", "options": column.name},
            "properties": list(_properties(column)),
        }


def _properties(column: Column) -> Iterator[dict[str, Any]]:
    if column.unit:
        yield {"id": "unit", "value": column.unit.value}
    if column.links:
        yield {"id": "links", "value": [_link(link) for link in column.links]}
    if column.texts:
        texts = {value: {"text": text} for value, text in column.texts.items()}
        yield {"id": "mappings", "value": [{"type": "value", "options": texts}]}
    if column.hidden:
        yield {"id": "custom.hidden", "value": True}
    if column.thresholds:
        yield {"id": "thresholds", "value": _steps(column.thresholds)}
    if column.coloured:
        yield {"id": "color", "value": {"mode": "thresholds"}}
        yield {"id": "custom.cellOptions", "value": {"type": "color-background", "mode": "basic"}}


def _link(link: Link) -> dict[str, Any]:
    return {"title": link.title, "url": link.url, "targetBlank": False}
