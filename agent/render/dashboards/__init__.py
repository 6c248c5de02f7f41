"""Grafana dashboards, made from the catalogue and the objectives."""

from agent.render.dashboards.dashboard_files import render_dashboards

__all__ = ["render_dashboards"]
