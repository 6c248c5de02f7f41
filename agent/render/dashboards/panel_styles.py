"""Styles of panels: Grafana's plugin, its options, and how it draws a series."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
