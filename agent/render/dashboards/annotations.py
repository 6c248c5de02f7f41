"""What is marked on every graph: events of engines, and alerts while they fire."""

from collections.abc import Mapping
from typing import Any

from agent.catalog import metrics as m
from agent.render.dashboards.expressions import RATE, increase
from agent.render.dashboards.variables import PROMETHEUS

BUILT_IN: Mapping[str, Any] = {
    "builtIn": 1,
    "datasource": {"type": "grafana", "uid": "-- Grafana --"},
    "enable": True,
    "hide": True,
    "iconColor": "rgba(0, 211, 255, 1)",
    "name": "Annotations & Alerts",
    "type": "dashboard",
}


def _marked(name: str, colour: str, expression: str, title: str, tags: str) -> dict[str, Any]:
    return {
        "datasource": dict(PROMETHEUS),
        "enable": True,
        "hide": False,
        "iconColor": colour,
        "name": name,
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
