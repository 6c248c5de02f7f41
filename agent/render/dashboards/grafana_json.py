"""A dashboard as Grafana's JSON, in schema version 39 for Grafana 11 and newer."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

from agent.render.dashboards.annotations import BUILT_IN
from agent.render.dashboards.panel_parts import (
    Column,
    Dashboard,
    Link,
    Panel,
    PanelRow,
    Query,
    Sql,
    Threshold,
)
from agent.render.dashboards.variables import POSTGRES, PROMETHEUS

SCHEMA_VERSION = 39
COLUMNS = 24
TAG = "goodput-agent"

_ROW_HEIGHT = 1
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
    return json.dumps(dashboard_json(dashboard), indent=2, ensure_ascii=False) + "\n"


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    return {
        "id": None,
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": [TAG],
        "timezone": "browser",
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": f"now-{dashboard.hours}h", "to": "now"},
        "schemaVersion": SCHEMA_VERSION,
        "annotations": {"list": [dict(mark) for mark in (BUILT_IN, *dashboard.annotations)]},
        "templating": {"list": [dict(variable) for variable in dashboard.variables]},
        "links": [_links_to_others()],
        "panels": list(_placed(dashboard.rows)),
    }


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
    for row in rows:
        panels = list(_flowing(row, y + _ROW_HEIGHT))
        yield _heading(row, y, panels if row.closed else [])
        if not row.closed:
            yield from panels
        y = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)


def _heading(row: PanelRow, y: int, inside: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": stable_id(f"row: {row.title}"),
        "type": "row",
        "title": row.title,
        "collapsed": row.closed,
        "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": _ROW_HEIGHT},
        "panels": inside,
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


def _source(query: Query | Sql) -> Mapping[str, str]:
    return PROMETHEUS if isinstance(query, Query) else POSTGRES


def _targets(panel: Panel) -> Iterator[dict[str, Any]]:
    queries: Sequence[Query | Sql] = panel.queries
    for place, query in enumerate(queries):
        yield _target(panel, query, chr(ord("A") + place))


def _target(panel: Panel, query: Query | Sql, name: str) -> dict[str, Any]:
    common = {"refId": name, "datasource": dict(_source(query)), "editorMode": "code"}
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
    if column.hidden:
        yield {"id": "custom.hidden", "value": True}
    if column.thresholds:
        yield {"id": "thresholds", "value": _steps(column.thresholds)}
    if column.coloured:
        yield {"id": "color", "value": {"mode": "thresholds"}}
        yield {"id": "custom.cellOptions", "value": {"type": "color-background", "mode": "basic"}}


def _link(link: Link) -> dict[str, Any]:
    return {"title": link.title, "url": link.url, "targetBlank": False}
