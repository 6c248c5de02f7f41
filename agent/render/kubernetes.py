"""The alert rules as a resource of the Prometheus Operator."""

from collections.abc import Mapping

import yaml

from agent.render.alerts.alert_files import RULES
from agent.render.yaml_text import yaml_text

PROMETHEUS_RULE = "deploy/kubernetes/prometheusrule.yaml"


def render_kubernetes(files: Mapping[str, str]) -> Mapping[str, str]:
    """The texts of Kubernetes files by path, made from those of `render_alerts`.

    The rules for vLLM alone are left out: beside the agent's rules they would repeat each alert.
    """
    document = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "goodput-agent"},
        "spec": {"groups": yaml.safe_load(files[RULES])["groups"]},
    }
    return {PROMETHEUS_RULE: yaml_text(document, "For the Prometheus Operator.")}
