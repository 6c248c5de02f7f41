"""The alert rules as the Prometheus Operator takes them."""

from collections.abc import Mapping

import yaml

from agent.render.alerts.alert_files import RULES
from agent.render.yaml_text import yaml_text

PROMETHEUS_RULE = "deploy/kubernetes/prometheusrule.yaml"


def render_kubernetes(files: Mapping[str, str]) -> Mapping[str, str]:
    """The texts of Kubernetes files by their paths, made from those of `render_alerts`.

    The rules for vLLM alone are left out: beside the agent's they would tell everything twice.
    """
    document = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "goodput-agent"},
        "spec": {"groups": yaml.safe_load(files[RULES])["groups"]},
    }
    return {PROMETHEUS_RULE: yaml_text(document, "For the Prometheus Operator.")}
