"""Routes, receivers and inhibitions, by amtool and by a real Alertmanager."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import requests

from agent.render.alerts import Receivers, RuleOptions, Timings, render_alerts
from agent.render.alerts.agent_alerts import WATCHDOG
from agent.render.alerts.alert_files import ALERTMANAGER, RULES, VLLM_ALONE, yaml_text
from agent.render.alerts.alertmanager import INHIBITIONS, alertmanager
from tests.real_parts.alertmanager import (
    Alertmanager,
    Webhook,
    complaints_about_config,
    receivers_of,
)
from tests.real_parts.metric_pages import total
from tests.real_parts.recording_server import recording_server
from tests.real_parts.waiting import eventually
from tests.render.alerts.cases import OBJECTIVES, TEXTS, alert_rules
from tests.render.alerts.test_cases import PACKS

ALERTS = [rule for file in (RULES, VLLM_ALONE) for rule in alert_rules(TEXTS[file])]
# The labels of each alert as its case shows them.
LABELS = {
    **{case.alert: set(case.labels) for pack in PACKS.values() for case in pack.cases},
    "LlmObjectiveBudgetBurn": {"objective", "model", "severity", "tier"},
}


EACH_WAY = {(rule["labels"]["severity"], rule["alert"] == WATCHDOG): rule for rule in ALERTS}


@pytest.mark.parametrize("rule", EACH_WAY.values(), ids=lambda rule: str(rule["alert"]))
def test_an_alert_goes_to_the_receiver_of_its_severity(
    rule: dict[str, Any], tmp_path: Path
) -> None:
    config = tmp_path / "alertmanager.yml"
    config.write_text(render_alerts(OBJECTIVES)[ALERTMANAGER], encoding="utf-8")
    severity = rule["labels"]["severity"]
    receivers = receivers_of(config, {"alertname": rule["alert"], "severity": severity})
    nowhere = "deadman" if rule["alert"] == WATCHDOG else "nobody"
    assert receivers == {"critical": "page", "warning": "ticket", "info": nowhere}[severity]


def test_muting_and_muted_alerts_exist_and_have_the_shared_labels() -> None:
    names = {rule["alert"] for rule in ALERTS}
    for inhibition in INHIBITIONS:
        for name in (*inhibition.sources, *inhibition.targets):
            assert name in names
            assert set(inhibition.equal) <= LABELS[name], name
        for matcher in (*inhibition.only_sources, *inhibition.only_targets):
            narrowed = (
                inhibition.sources if matcher in inhibition.only_sources else inhibition.targets
            )
            (label, *_) = re.findall(r"\w+", matcher)
            # A label that an alert lacks is empty to Alertmanager.
            assert '=~"|' in matcher or all(label in LABELS[name] for name in narrowed)
        # A label that both lack would count as equal, and an alert must not mute itself.
        assert not set(inhibition.sources) & set(inhibition.targets) or inhibition.only_sources


def test_an_alert_on_a_model_mutes_no_alert_on_another_model() -> None:
    on_models = [
        inhibition
        for inhibition in INHIBITIONS
        if all("model" in LABELS[name] for name in (*inhibition.sources, *inhibition.targets))
    ]
    assert len(on_models) > 8
    assert all("model" in inhibition.equal for inhibition in on_models)


def test_no_two_alerts_mute_each_other() -> None:
    above: dict[str, set[str]] = {}
    for inhibition in INHIBITIONS:
        # Of one budget, the matchers tell which mutes which.
        if inhibition.sources != inhibition.targets:
            for name in inhibition.targets:
                above.setdefault(name, set()).update(inhibition.sources)
    # A cycle is an error.
    TopologicalSorter(above).prepare()


def test_every_page_on_an_engine_mutes_alerts_on_its_objectives() -> None:
    pages = {rule["alert"] for rule in ALERTS if rule["labels"]["severity"] == "critical"}
    on_engines = {name for name in pages if {"engine", "instance"} <= LABELS[name]}
    (explained, *_) = [rule["expr"] for rule in ALERTS if rule["alert"] == "LlmMissesExplained"]
    named = dict(re.findall(r'on \((.*?)\) max_over_time\(ALERTS{alertname=~"([^"]*)"', explained))
    both = {name for name in on_engines if name.startswith("Llm")}
    on_models = {name for name in both if "model" in LABELS[name]}
    assert set(named["instance, engine, model"].split("|")) == on_models != set()
    assert set(named["instance, engine"].split("|")) == both - on_models


def test_an_alert_with_an_engine_opens_the_dashboard_on_it() -> None:
    for rule in ALERTS:
        if "engine" in LABELS.get(rule["alert"], ()) and not rule["alert"].startswith("Vllm"):
            link = rule["annotations"]["dashboard_url"]
            assert "&var-engine={{ $labels.engine | urlquery }}" in link, rule["alert"]


@dataclass(frozen=True, slots=True)
class Sent:
    """An alert that fires, and whether something that fires beside it explains it."""

    name: str
    severity: str
    muted: bool
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_told(self) -> bool:
        """Whether a receiver gets the alert."""
        return not self.muted and (self.severity != "info" or self.name == WATCHDOG)

    def posted(self) -> dict[str, Any]:
        """The same as Prometheus sends it."""
        return {
            "labels": {"alertname": self.name, "severity": self.severity, **self.labels},
            "annotations": {"summary": "s", "description": "d", "runbook_url": "http://r"},
        }


def _of(name: str, severity: str = "critical", *, muted: bool = False, **labels: str) -> Sent:
    return Sent(name, severity, muted, labels)


def _engine(number: int, name: str, severity: str = "critical", *, muted: bool, model: str) -> Sent:
    labels = {"instance": "a:9470", "engine": f"chat-{number}", "model": model}
    return Sent(name, severity, muted, labels)


def _gpu(number: int, name: str, *, muted: bool, **labels: str) -> Sent:
    return Sent(name, "critical", muted, {"instance": "a:9470", "gpu": f"GPU-{number}", **labels})


def _vllm(port: int, name: str, severity: str = "critical", *, muted: bool = True) -> Sent:
    on_model = {"instance": f"v:{port}", "model_name": "llama"}
    return Sent(name, severity, muted, {"instance": f"v:{port}"} if "Down" in name else on_model)


def _budget(model: str, name: str, severity: str, tier: str = "", *, muted: bool) -> Sent:
    labels = {"objective": "chat", "model": model}
    return Sent(name, severity, muted, {**labels, "tier": tier} if tier else labels)


def _on_limit(model: str, name: str) -> Sent:
    labels = {"objective": "chat", "model": model, "instance": "a:9470", "engine": "chat-5"}
    return Sent(name, "warning", True, labels)


_BURN = "LlmObjectiveBudgetBurn"
SENT = (
    _of(WATCHDOG, "info"),
    # A budget, and what its users feel.
    _budget("llama", _BURN, "critical", "1", muted=False),
    _budget("llama", _BURN, "critical", "2", muted=True),
    _budget("llama", _BURN, "warning", "4", muted=True),
    _of(
        "LlmTtftOverLimit",
        "warning",
        muted=True,
        **{"objective": "chat", "model": "llama", "instance": "a:9470", "engine": "chat-9"},
    ),
    # A page that has ended, and slower alerts on its misses.
    _budget("m5", "LlmObjectivePagedLately", "info", muted=False),
    _budget("m5", _BURN, "critical", "2", muted=True),
    _on_limit("m5", "LlmTtftOverLimit"),
    _on_limit("m5", "LlmErrorRatioOverLimit"),
    _budget("m6", "LlmObjectivePagedLately", "info", muted=False),
    _budget("m6", _BURN, "warning", "3", muted=False),
    # The queue is what makes it slow, and more replicas are what it needs.
    _engine(9, "LlmQueueDeep", "warning", muted=True, model="llama"),
    _of("LlmTooFewReplicas", "warning", muted=True, **{"objective": "chat", "model": "llama"}),
    # An engine that died, one that is down, one that hangs.
    _engine(0, "LlmCudaOutOfMemory", muted=False, model="m0"),
    _engine(0, "LlmEngineDown", muted=True, model="m0"),
    _engine(0, "LlmEngineNeverUp", "warning", muted=True, model="m0"),
    _engine(1, "LlmEngineDown", muted=False, model="m1"),
    _engine(2, "LlmEngineHanging", muted=False, model="m2"),
    _engine(2, "LlmRequestsTimingOut", "warning", muted=True, model="m2"),
    _engine(2, "LlmQueueDeep", "warning", muted=True, model="m2"),
    # One that turns requests away, and one before which somebody else does.
    _engine(3, "LlmAdmissionRejections", "warning", muted=False, model="m3"),
    _engine(3, "LlmRequestsThrottled", "warning", muted=True, model="m3"),
    _engine(3, "LlmErrorRatioOverLimit", "warning", muted=True, model="m3"),
    _engine(4, "LlmRequestsThrottled", "warning", muted=False, model="m4"),
    _engine(4, "LlmErrorRatioOverLimit", "warning", muted=True, model="m4"),
    # Objectives that the page on an engine explains, and the ticket on what is left.
    _budget("m0", "LlmMissesExplained", "info", muted=False),
    _budget("m0", "LlmObjectiveOutage", "critical", muted=True),
    _budget("m1", "LlmMissesExplained", "info", muted=False),
    _budget("m1", _BURN, "warning", "3", muted=False),
    # One agent that was the only one.
    _of("LlmAgentDown", instance="a:9470", job="agents"),
    _of("LlmAgentsMissing", muted=True),
    _of("LlmObjectiveNotPublished", "warning", muted=True, objective="chat"),
    _of("LlmAgentStoreFailing", "warning", instance="b:9470", what="requests"),
    _of("LlmAgentStoreBehind", "warning", muted=True, instance="b:9470"),
    _of("LlmAgentStageBehind", "warning", muted=True, instance="b:9470", stage="fold"),
    _of("LlmAgentJobLate", "warning", muted=True, instance="b:9470", job_name="settle requests"),
    _of("LlmAgentStageBehind", "warning", instance="c:9470", stage="forward"),
    # A fault of a GPU's memory, reported once, and a fault of another kind.
    _gpu(1, "GpuRowRemapFailed", muted=False),
    _gpu(1, "GpuXidCritical", muted=True, xid="64"),
    _gpu(1, "GpuXidCritical", muted=False, xid="79"),
    _gpu(1, "GpuEccUncorrected", muted=True),
    _gpu(2, "GpuXidCritical", muted=False, xid="48"),
    _gpu(2, "GpuEccUncorrected", muted=True),
    _gpu(3, "GpuEccUncorrected", muted=False),
    # vLLM without an agent: the only one is down, one is full.
    _vllm(8000, "VllmDown", muted=False),
    _of("VllmMissing", muted=True),
    _vllm(8000, "VllmSilent"),
    _vllm(8000, "VllmQueueDeep", "warning"),
    _vllm(8000, "VllmTtftOverLimit", "warning"),
    _vllm(8001, "VllmKvCacheSaturated", "warning", muted=False),
    _vllm(8001, "VllmQueueDeep", "warning"),
    _vllm(8002, "VllmQueueDeep", "warning", muted=False),
)


def _key(labels: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(labels.items()))


def _config(url: str, secrets: Path) -> str:
    receivers = Receivers(
        webhook=f"{url}/alerts",
        deadman=f"{url}/deadman",
        slack_pages="#pages",
        slack_tickets="#tickets",
        secrets=str(secrets),
    )
    return render_alerts(OBJECTIVES, Timings(speed=60), receivers=receivers)[ALERTMANAGER]


def test_an_alert_arrives_and_mutes_the_alerts_that_it_explains(tmp_path: Path) -> None:
    muted = {_key(sent.posted()["labels"]): sent.muted for sent in SENT}
    expected = {_key(sent.posted()["labels"]) for sent in SENT if sent.is_told}

    def posted_names() -> set[str]:
        found = [alert for path in ("/alerts", "/deadman") for alert in webhook.alerts(path)]
        return {_key(one.labels) for one in found}

    def is_muted() -> dict[str, bool]:
        found = alertmanager.alerts()
        return {_key(alert["labels"]): bool(alert["status"]["inhibitedBy"]) for alert in found}

    with (
        Webhook() as webhook,
        recording_server() as slack,
        Alertmanager(tmp_path, _config(webhook.url, tmp_path)) as alertmanager,
    ):
        slack.status, slack.body = 200, b"ok"
        (tmp_path / "slack_api_url").write_text(slack.url, encoding="utf-8")
        alertmanager.send([sent.posted() for sent in SENT])
        eventually(lambda: posted_names() >= expected, within_s=60, what="the alerts")
        eventually(lambda: is_muted() == muted, within_s=30, what="the muted alerts")
        assert posted_names() == expected
        # One message of pages and one of tickets at least.
        eventually(lambda: len(slack.requests) >= 2, within_s=60, what="Slack's messages")
        page = requests.get(f"{alertmanager.url}/metrics", timeout=30).text
    assert total(page, "alertmanager_notifications_total") > 0
    assert total(page, "alertmanager_notifications_failed_total") == 0
    assert total(page, "alertmanager_notification_requests_failed_total") == 0


CHOICES: Mapping[str, Any] = {
    "pagerduty": True,
    "slack_pages": "#pages",
    "slack_tickets": "#tickets",
    "webhook": "https://w.test/alerts",
    "webhook_token": True,
    "deadman": "https://d.test/ping",
}
COMBINATIONS = [
    {name: CHOICES[name] for name, taken in zip(CHOICES, choice, strict=True) if taken}
    for choice in product((False, True), repeat=len(CHOICES))
]
EVERYONE = Receivers(**CHOICES, secrets="/s")


def receiver(name: str) -> dict[str, Any]:
    (found,) = (found for found in EVERYONE.configured() if found["name"] == name)
    return found


@pytest.mark.parametrize("chosen", [{}, CHOICES], ids=["none", "all"])
def test_alertmanager_accepts_receivers(chosen: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "alertmanager.yml"
    document = alertmanager(Timings(), Receivers(**chosen), RuleOptions())
    path.write_text(yaml_text(document), encoding="utf-8")
    assert complaints_about_config(path) == ""


def test_only_configured_receivers_get_alerts() -> None:
    for chosen in COMBINATIONS:
        both = {"webhook"} & chosen.keys()
        expected = {
            "page": both
            | ({"pagerduty"} & chosen.keys())
            | ({"slack"} if "slack_pages" in chosen else set()),
            "ticket": both | ({"slack"} if "slack_tickets" in chosen else set()),
            "deadman": {"webhook"} if "deadman" in chosen else set(),
        }
        kinds = {
            receiver["name"]: {key.removesuffix("_configs") for key in receiver.keys() - {"name"}}
            for receiver in Receivers(**chosen).configured()
        }
        assert kinds == expected
        silent = {name for name, kinds in expected.items() if not kinds}
        said = " ".join(Receivers(**chosen).silences())
        words = ("page", "PAGES REACH"), ("ticket", "TICKETS REACH"), ("deadman", "DEAD MAN'S")
        assert {name for name, word in words if word in said} == silent


def test_only_a_receiver_in_use_needs_its_secret() -> None:
    def files(**chosen: Any) -> set[str]:
        return set(re.findall(r"'\w+_file': '(.+?)'", str(Receivers(**chosen).configured())))

    folder = "/etc/alertmanager/secrets"
    assert files(slack_tickets="#t") == {f"{folder}/slack_api_url"}
    assert files(pagerduty=True, secrets="/s") == {"/s/pagerduty_routing_key"}
    assert files(webhook="https://w.test", deadman="https://d.test") == set()
    assert files(webhook="https://w.test", webhook_token=True) == {f"{folder}/webhook_token"}


def test_secrets_are_in_files_and_each_goes_to_its_receiver_alone() -> None:
    words = re.findall(r"'(\w*(?:key|api|credentials)\w*)':", str(EVERYONE.configured()))
    assert len(words) >= 4
    assert all(word.endswith("_file") for word in words)
    (webhook,) = receiver("ticket")["webhook_configs"]
    assert webhook["http_config"]["authorization"] == {"credentials_file": "/s/webhook_token"}
    assert receiver("deadman")["webhook_configs"] == [
        {"url": "https://d.test/ping", "send_resolved": False}
    ]
    for name in ("page", "ticket"):
        (slack,) = receiver(name)["slack_configs"]
        assert slack["channel"] == f"#{name}s"
        assert re.findall(r"\|(\w+)>", slack["text"]) == ["Dashboard", "Runbook"]
