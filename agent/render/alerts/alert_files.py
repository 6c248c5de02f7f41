"""The files of `alerts/` and the Kubernetes files as texts."""

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any

import yaml

from agent.analysis.burn_rates import plan
from agent.records.objective import Objective
from agent.render.alerts.agent_alerts import agent_alerts
from agent.render.alerts.alert_rule import Alert, RuleOptions, Timings, group, percent
from agent.render.alerts.alertmanager import Receivers, alertmanager
from agent.render.alerts.engine_alerts import engine_alerts
from agent.render.alerts.gpu_alerts import gpu_alerts
from agent.render.alerts.latency_alerts import Shortcoming, all_latency_alerts, latency_shortcomings
from agent.render.alerts.objective_alerts import objective_alerts, recordings
from agent.render.alerts.request_alerts import cost_alerts, request_alerts
from agent.render.alerts.thresholds import THRESHOLDS
from agent.render.alerts.vllm_alerts import vllm_alerts, vllm_shortcomings
from agent.render.links import PLACEHOLDERS, Links

NOTICE = "# Made by `goodput-agent render`, which overwrites changes.\n"


class _Dumper(yaml.SafeDumper):
    """A dumper that writes texts of several lines as blocks, without aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always true: each value is written in full."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def yaml_text(document: Mapping[str, Any], *remarks: str) -> str:
    """The document after comments: that it is generated, and these remarks."""
    comments = "".join(f"# {remark}\n" for remark in remarks)
    body = yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True, indent=2
    )
    return NOTICE + comments + body


RULES = "alerts/goodput-agent.yml"
VLLM_ALONE = "alerts/vllm-alone.yml"
ALERTMANAGER = "alerts/alertmanager.yml"


def render_alerts(
    objectives: Sequence[Objective],
    timings: Timings | None = None,
    links: Links | None = None,
    *,
    elsewhere: Links = PLACEHOLDERS,
    budget_usd: float | None = None,
    receivers: Receivers | None = None,
    options: RuleOptions | None = None,
) -> Mapping[str, str]:
    """The texts of all files by path; equal arguments give equal texts.

    `elsewhere` are the links in rules for vLLM alone, where no agent serves the runbooks.
    `budget_usd` is the budget for a million output tokens.
    """
    timings, links, options = timings or Timings(), links or Links(), options or RuleOptions()
    alerts = all_alerts(objectives, timings, budget_usd)
    return {
        RULES: _rules(alerts, objectives, timings, links, options),
        VLLM_ALONE: _vllm_alone(objectives, timings, elsewhere, options),
        ALERTMANAGER: yaml_text(
            alertmanager(timings, receivers or Receivers(), options),
            "For Alertmanager 0.25 and newer.",
        ),
    }


def shortcomings(objectives: Sequence[Objective]) -> Iterator[Shortcoming]:
    """Every rule that an objective cannot have, or only less exact than intended."""
    for objective in objectives:
        for burn in plan(objective.target, objective.window_s).dead:
            reason = f"it would need {percent(burn.threshold)} of all requests to miss"
            yield Shortcoming(
                objective.name, f"LlmObjectiveBudgetBurn tier {burn.tier.number}", reason
            )
    yield from latency_shortcomings(objectives)
    yield from vllm_shortcomings(objectives)


def all_alerts(
    objectives: Sequence[Objective], timings: Timings, budget_usd: float | None = None
) -> Mapping[str, list[Alert]]:
    """The alerts of the agent's own rule file, by group; no group is empty."""
    groups = {
        "goodput-objectives": list(objective_alerts(objectives, timings)),
        "goodput-latency": list(all_latency_alerts(objectives, timings)),
        "goodput-requests": list(request_alerts(timings)),
        "goodput-engines": list(engine_alerts(timings)),
        "goodput-gpus": list(gpu_alerts(timings)),
        "goodput-costs": list(cost_alerts(budget_usd, timings)),
        "goodput-agents": list(agent_alerts(timings)),
    }
    return {name: alerts for name, alerts in groups.items() if alerts}


def _rules(
    alerts: Mapping[str, list[Alert]],
    objectives: Sequence[Objective],
    timings: Timings,
    links: Links,
    options: RuleOptions,
) -> str:
    recorded = group("goodput-recordings", recordings(objectives, timings), timings, links, options)
    groups = [group(name, found, timings, links, options) for name, found in alerts.items()]
    remark = "For Prometheus 2.42 and newer that scrapes goodput-agent."
    return yaml_text({"groups": [recorded, *groups]}, remark)


def _vllm_alone(
    objectives: Sequence[Objective], timings: Timings, links: Links, options: RuleOptions
) -> str:
    alerts = group("vllm-alone", vllm_alerts(objectives, timings), timings, links, options)
    return yaml_text(
        {"groups": [alerts]},
        "For Prometheus 2.42 and newer that scrapes vLLM and no goodput-agent. A limit is rounded",
        "up to the next bucket edge of vLLM's histogram.",
    )


PROMETHEUS_RULE = "deploy/kubernetes/prometheusrule.yaml"
# What the chart reads: Helm reads only files inside of it.
CHART_FILES = "deploy/helm/goodput-agent/files"
CHART_RULES = f"{CHART_FILES}/rules.yaml"
CHART_THRESHOLDS = f"{CHART_FILES}/thresholds.yaml"


def _number(value: Decimal) -> int | float:
    return int(value) if value == int(value) else float(value)


def render_kubernetes(
    files: Mapping[str, str], chart_files: Mapping[str, str], dashboards: Mapping[str, str]
) -> Mapping[str, str]:
    """The texts of Kubernetes files by path, made from those of `render_alerts` and of dashboards.

    `chart_files` are those with ChartOptions. The rules for vLLM alone are left out: beside the
    agent's rules they would repeat each alert.
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
        CHART_RULES: yaml_text(yaml.safe_load(chart_files[RULES]), "For the Helm chart."),
        CHART_THRESHOLDS: yaml_text(
            {name: _number(each.default) for name, each in THRESHOLDS.items()},
            "The defaults of the Helm chart.",
        ),
        **chart,
    }
