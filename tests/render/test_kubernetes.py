"""The alert rules and dashboards as the Prometheus Operator and the Helm chart take them."""

from pathlib import Path

import yaml

from agent.render.alerts import PLACEHOLDERS, render_alerts
from agent.render.alerts.alert_files import RULES
from agent.render.dashboards import render_dashboards
from agent.render.kubernetes import CHART_FILES, CHART_RULES, PROMETHEUS_RULE, render_kubernetes
from agent.settings.settings_model import Settings

ROOT = Path(__file__).parents[2]
ALERTS = render_alerts(Settings().all_objectives(), links=PLACEHOLDERS)
DASHBOARDS = render_dashboards(Settings().all_objectives())
MADE = render_kubernetes(ALERTS, DASHBOARDS)


def test_committed_files_are_those_rendered_from_the_settings() -> None:
    in_chart = {path for path in (ROOT / CHART_FILES).rglob("*") if path.is_file()}
    assert {ROOT / path for path in MADE} == {ROOT / PROMETHEUS_RULE, *in_chart}
    changed = [path for path, text in MADE.items() if (ROOT / path).read_text("utf-8") != text]
    assert changed == [], "run goodput-agent render and commit deploy/"


def test_both_files_of_rules_contain_the_agents_once_and_none_for_vllm_alone() -> None:
    rules = yaml.safe_load(ALERTS[RULES])
    assert yaml.safe_load(MADE[PROMETHEUS_RULE])["spec"] == rules
    assert yaml.safe_load(MADE[CHART_RULES]) == rules


def test_the_chart_has_every_dashboard() -> None:
    in_chart = [text for path, text in MADE.items() if path.endswith(".json")]
    assert in_chart == list(DASHBOARDS.values())
