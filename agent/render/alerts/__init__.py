"""Alert rules and the configuration of Alertmanager."""

from agent.render.alerts.alert_files import render_alerts, shortcomings
from agent.render.alerts.alert_rule import ChartOptions, RuleOptions, Severity, Timings
from agent.render.alerts.alertmanager import DEFAULT_SECRETS, Receivers
from agent.render.alerts.latency_alerts import Shortcoming
from agent.render.links import PLACEHOLDERS, Links

__all__ = [
    "DEFAULT_SECRETS",
    "PLACEHOLDERS",
    "ChartOptions",
    "Links",
    "Receivers",
    "RuleOptions",
    "Severity",
    "Shortcoming",
    "Timings",
    "render_alerts",
    "shortcomings",
]
