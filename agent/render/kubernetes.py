"""Alert rules and dashboards for the Prometheus Operator and for the Helm chart."""

from collections.abc import Mapping
from pathlib import PurePosixPath

import yaml

from agent.render.alerts.alert_files import RULES
from agent.render.yaml_text import yaml_text

PROMETHEUS_RULE = "deploy/kubernetes/prometheusrule.yaml"
# What the chart reads: Helm reads only files inside of it.
CHART_FILES = "deploy/helm/goodput-agent/files"
CHART_RULES = f"{CHART_FILES}/rules.yaml"


def render_kubernetes(files: Mapping[str, str], dashboards: Mapping[str, str]) -> Mapping[str, str]:
    """The texts of Kubernetes files by path, made from those of `render_alerts` and of dashboards.

    The rules for vLLM alone are left out: beside the agent's rules they would repeat each alert.
    """
    spec = {"groups": yaml.safe_load(files[RULES])["groups"]}
    document = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "goodput-agent"},
        "spec": spec,
    }
    chart = {
        f"{CHART_FILES}/dashboards/{PurePosixPath(path).name}": text
        for path, text in dashboards.items()
    }
    return {
        PROMETHEUS_RULE: yaml_text(document, "For the Prometheus Operator."),
        CHART_RULES: yaml_text(spec, "For the Helm chart."),
        **chart,
    }
