"""The alert rules as the Prometheus Operator takes them."""

from pathlib import Path

import yaml

from agent.render.alerts import PLACEHOLDERS, render_alerts
from agent.render.alerts.alert_files import RULES
from agent.render.kubernetes import PROMETHEUS_RULE, render_kubernetes
from agent.settings.settings_model import Settings

ROOT = Path(__file__).parents[2]
ALERTS = render_alerts(Settings().all_objectives(), links=PLACEHOLDERS)


def test_committed_files_are_those_rendered_from_the_settings() -> None:
    made = render_kubernetes(ALERTS)
    assert made.keys() == {PROMETHEUS_RULE}
    committed = (ROOT / PROMETHEUS_RULE).read_text(encoding="utf-8")
    assert committed == made[PROMETHEUS_RULE], "run goodput-agent render and commit deploy/"


def test_the_file_contains_the_agents_rules_once_and_none_for_vllm_alone() -> None:
    document = yaml.safe_load(render_kubernetes(ALERTS)[PROMETHEUS_RULE])
    assert document["spec"] == yaml.safe_load(ALERTS[RULES])
