"""Annotations on every graph: events of engines, Xids of GPUs, and firing alerts."""

from collections.abc import Mapping
from typing import Any

from agent.catalog import gpu_facts
from agent.catalog import metrics as m
from agent.render.dashboards.panel_queries import GPU, RATE, increase, of_agents
from agent.render.dashboards.request_sql import EVENTS as EVENTS_SQL
from agent.render.dashboards.variables import POSTGRES, PROMETHEUS
from agent.render.promql import by

BUILT_IN: Mapping[str, Any] = {
    "builtIn": 1,
    "datasource": {"type": "grafana", "uid": "-- Grafana --"},
    "enable": True,
    "hide": True,
    "iconColor": "rgba(0, 211, 255, 1)",
    "name": "Annotations & Alerts",
    "type": "dashboard",
}


def _mark(name: str, colour: str, source: Mapping[str, str]) -> dict[str, Any]:
    return {
        "datasource": dict(source),
        "enable": True,
        "hide": False,
        "iconColor": colour,
        "name": name,
    }


def _marked(name: str, colour: str, expression: str, title: str, tags: str) -> dict[str, Any]:
    return {
        **_mark(name, colour, PROMETHEUS),
        "expr": expression,
        "step": "60s",
        "titleFormat": title,
        "textFormat": "",
        "tagKeys": tags,
    }


EVENTS = _marked(
    "Events",
    "orange",
    f"{increase(m.ENGINE_EVENTS, RATE)} > 0",
    "{{kind}} on {{engine}}",
    "engine,kind",
)
ALERTS = _marked(
    "Alerts",
    "red",
    'ALERTS{alertname=~"(Llm|Gpu).+",alertstate="firing",severity=~"page|ticket"}',
    "{{alertname}}",
    "severity,objective,engine,gpu",
)
# The value is the time of the Xid: it is exact between scrapes, and present from the first Xid on.
XIDS = {
    **_marked(
        "Xids",
        "purple",
        f"1000 * {by((*GPU, 'xid'), of_agents(gpu_facts.XID_LAST_SEEN), 'max')}",
        "Xid {{xid}} on {{gpu}}",
        "gpu,xid",
    ),
    "useValueForTime": True,
}
STORED = {
    **_mark("Events", "orange", POSTGRES),
    "target": {
        "refId": "Annotation",
        "editorMode": "code",
        "format": "table",
        "rawQuery": True,
        "rawSql": EVENTS_SQL,
    },
}
