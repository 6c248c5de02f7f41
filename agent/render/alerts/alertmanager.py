"""The configuration of Alertmanager: who is told what, how often, and what need not be told."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent.render.alerts.agents import WATCHDOG
from agent.render.alerts.objectives import BURN, OUTAGE
from agent.render.alerts.rule import AGENT, ENGINE, ENGINE_MODEL, GPU, OBJECTIVE, Severity
from agent.render.alerts.timings import Timings
from agent.render.links import Links

_MINUTE_S = 60
_HOUR_S = 60 * _MINUTE_S

_DETAILS = (
    "{{ range .Alerts }}*{{ .Annotations.summary }}*\n{{ .Annotations.description }}\n"
    "{{ if .Annotations.dashboard_url }}<{{ .Annotations.dashboard_url }}|Dashboard> · {{ end }}"
    "<{{ .Annotations.runbook_url }}|Runbook>\n{{ end }}"
)
_TITLE = (
    '[{{ .Status | toUpper }}{{ if eq .Status "firing" }} {{ .Alerts.Firing | len }}{{ end }}] '
    "{{ .CommonLabels.alertname }}"
)


@dataclass(frozen=True, slots=True)
class Inhibition:
    """While one of `why` fires, none of `what` is told whose labels in `same` are equal.

    A label that both lack counts as equal, so all of these alerts have the labels in `same`.
    """

    why: tuple[str, ...]
    what: tuple[str, ...]
    same: tuple[str, ...]


_LATENCY = ("LlmTtftOverLimit", "LlmTpotOverLimit", "LlmDurationOverLimit", "LlmQueueTimeHigh")
_DEATHS = (
    "LlmCudaOutOfMemory",
    "LlmHostOutOfMemory",
    "LlmEngineGpuFault",
    "LlmEngineSizingError",
    "LlmEngineDied",
)
_GPU_SIGNS = ("GpuRecoveryWanted", "GpuThrottled", "GpuRowRemapPending", "GpuNvlinkErrors")

INHIBITIONS = (
    # What an engine died of says more than that it is gone, and than what it answered meanwhile.
    Inhibition(_DEATHS, ("LlmEngineDown", "LlmEngineSilent"), ENGINE),
    Inhibition(
        (*_DEATHS, "LlmEngineDown", "LlmEngineHanging"),
        (*_LATENCY, "LlmErrorRatioOverLimit", "LlmRequestsFailing", "LlmEngineAnswersErrors"),
        ENGINE,
    ),
    # One that hangs may answer nothing at all.
    Inhibition(("LlmEngineHanging",), ("LlmEngineDown", "LlmEngineSilent"), ENGINE),
    Inhibition(("LlmEngineRestartLoop",), ("LlmEngineRestarted", "LlmEngineDown"), ENGINE),
    Inhibition(
        ("LlmRequestsFailing",),
        ("LlmErrorRatioOverLimit", "LlmEngineAnswersErrors"),
        ENGINE_MODEL,
    ),
    # Requests queue up for the cache, and not for a place in the batch.
    Inhibition(("LlmKvCacheSaturated",), ("LlmQueueDeep", "LlmQueueTimeHigh"), ENGINE_MODEL),
    # The GPU's own alert names what is wrong with it; the engine's knows no GPU by name.
    Inhibition(("GpuLost", "GpuXidCritical"), ("LlmEngineGpuFault",), AGENT),
    Inhibition(("GpuXidCritical",), ("GpuLost",), GPU),
    Inhibition(("GpuLost", "GpuXidCritical"), _GPU_SIGNS, GPU),
    Inhibition(("GpuRowRemapFailed",), ("GpuRowRemapPending",), GPU),
    Inhibition(("LlmAgentsMissing",), ("LlmObjectiveNotPublished",), ()),
)
_TIERS = ("1", "2", "3", "4")


def alertmanager(timings: Timings, links: Links) -> dict[str, Any]:
    """The configuration as Alertmanager 0.25 and newer reads it."""
    return {
        "route": _route(timings),
        "inhibit_rules": [*_burns(), *map(_rule, INHIBITIONS)],
        "receivers": _receivers(links),
    }


def _route(timings: Timings) -> dict[str, Any]:
    return {
        "receiver": "ticket",
        "group_by": ["alertname", "objective", "model"],
        "group_wait": timings.hold(30),
        "group_interval": timings.hold(5 * _MINUTE_S),
        "repeat_interval": timings.hold(24 * _HOUR_S),
        "routes": [
            {
                "receiver": "deadman",
                "matchers": [f'alertname="{WATCHDOG}"'],
                "group_wait": "0s",
                "group_interval": timings.hold(_MINUTE_S),
                "repeat_interval": timings.hold(_MINUTE_S),
            },
            {
                "receiver": "page",
                "matchers": [f'severity="{Severity.PAGE}"'],
                "group_wait": timings.hold(10),
                "repeat_interval": timings.hold(4 * _HOUR_S),
            },
        ],
    }


def _burns() -> list[dict[str, Any]]:
    """Of the alerts on one objective and model, only the most urgent."""
    burn = f'alertname="{BURN}"'
    rules = [
        {
            "source_matchers": [f'alertname="{OUTAGE}"'],
            "target_matchers": [burn],
            "equal": list(OBJECTIVE),
        }
    ]
    for place, tier in enumerate(_TIERS[:-1], start=1):
        rules.append(
            {
                "source_matchers": [burn, f'tier="{tier}"'],
                "target_matchers": [burn, f'tier=~"{"|".join(_TIERS[place:])}"'],
                "equal": list(OBJECTIVE),
            }
        )
    # What the user feels is told once, by the objective.
    pages = [_named((OUTAGE, BURN)), f'severity="{Severity.PAGE}"']
    for what, same in ((_LATENCY, OBJECTIVE), (("LlmQueueDeep",), ("model",))):
        rules.append(
            {
                "source_matchers": pages,
                "target_matchers": [_named(what)],
                "equal": list(same),
            }
        )
    return rules


def _rule(inhibition: Inhibition) -> dict[str, Any]:
    return {
        "source_matchers": [_named(inhibition.why)],
        "target_matchers": [_named(inhibition.what)],
        "equal": list(inhibition.same),
    }


def _named(names: Sequence[str]) -> str:
    return f'alertname=~"{"|".join(names)}"'


def _receivers(links: Links) -> list[dict[str, Any]]:
    return [
        {
            "name": "page",
            "pagerduty_configs": [_pagerduty(links)],
            "slack_configs": [_slack(links, "#llm-pages")],
            "webhook_configs": [_webhook(links, links.webhook)],
        },
        {
            "name": "ticket",
            "slack_configs": [_slack(links, "#llm-tickets")],
            "webhook_configs": [_webhook(links, links.webhook)],
        },
        {"name": "deadman", "webhook_configs": [_webhook(links, links.deadman, resolved=False)]},
    ]


def _pagerduty(links: Links) -> dict[str, Any]:
    return {
        "routing_key_file": f"{links.secrets}/pagerduty_routing_key",
        "send_resolved": True,
        "severity": "critical",
        "description": "{{ .CommonLabels.alertname }}: {{ (index .Alerts 0).Annotations.summary }}",
        "client": "goodput-agent",
        "client_url": "{{ (index .Alerts 0).Annotations.dashboard_url }}",
        "links": [
            {"href": "{{ (index .Alerts 0).Annotations.runbook_url }}", "text": "Runbook"},
        ],
        "details": {"description": "{{ (index .Alerts 0).Annotations.description }}"},
    }


def _slack(links: Links, channel: str) -> dict[str, Any]:
    return {
        "api_url_file": f"{links.secrets}/slack_api_url",
        "channel": channel,
        "send_resolved": True,
        "title": _TITLE,
        "title_link": "{{ (index .Alerts 0).Annotations.dashboard_url }}",
        "text": _DETAILS,
    }


def _webhook(links: Links, url: str, *, resolved: bool = True) -> dict[str, Any]:
    return {
        "url": url,
        "send_resolved": resolved,
        "http_config": {
            "authorization": {"credentials_file": f"{links.secrets}/webhook_token"},
        },
    }
