"""Routes and inhibitions, by amtool and by a real Alertmanager that posts to a webhook."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.render.alerts import Receivers, Timings, render_alerts
from agent.render.alerts.agent_alerts import WATCHDOG
from agent.render.alerts.alert_files import ALERTMANAGER, RULES, VLLM_ALONE
from agent.render.alerts.inhibitions import INHIBITIONS, Inhibition
from tests.real_parts.alertmanager import Alertmanager, complaints_about_config, receivers_of
from tests.real_parts.waiting import eventually
from tests.real_parts.webhook import Webhook
from tests.render.alerts.cases import OBJECTIVES
from tests.render.alerts.cost_cases import BUDGET_USD
from tests.render.alerts.selecting import alert_rules
from tests.render.alerts.test_cases import PACKS

TEXT = render_alerts(OBJECTIVES)[ALERTMANAGER]
RULE_TEXTS = render_alerts(OBJECTIVES, budget_usd=BUDGET_USD)
ALERTS = [rule for file in (RULES, VLLM_ALONE) for rule in alert_rules(RULE_TEXTS[file])]
# The labels of each alert as its case shows them.
LABELS = {
    **{case.alert: set(case.labels) for pack in PACKS.values() for case in pack.cases},
    "LlmObjectiveBudgetBurn": {"objective", "model", "severity", "tier"},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "alertmanager.yml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_the_configuration_is_valid(config: Path) -> None:
    assert complaints_about_config(config) == ""


def test_the_tool_refuses_an_invalid_configuration(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yml"
    path.write_text(TEXT.replace("receiver: ticket", "receiver: no-one"), encoding="utf-8")
    assert "no-one" in complaints_about_config(path)


def test_routes_match_a_severity_or_the_watchdog() -> None:
    routes = yaml.safe_load(TEXT)["route"]["routes"]
    matchers = {matcher for route in routes for matcher in route["matchers"]}
    assert matchers == {f'alertname="{WATCHDOG}"', 'severity="none"', 'severity="page"'}


EACH_WAY = {(rule["labels"]["severity"], rule["alert"] == WATCHDOG): rule for rule in ALERTS}


@pytest.mark.parametrize("rule", EACH_WAY.values(), ids=lambda rule: str(rule["alert"]))
def test_an_alert_goes_to_the_receiver_of_its_severity(rule: dict[str, Any], config: Path) -> None:
    severity = rule["labels"]["severity"]
    receivers = receivers_of(config, {"alertname": rule["alert"], "severity": severity})
    nowhere = "deadman" if rule["alert"] == WATCHDOG else "nobody"
    assert receivers == {"page": "page", "ticket": "ticket", "none": nowhere}[severity]


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
            assert all(label in LABELS[name] for name in narrowed)
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


def _above(name: str) -> set[str]:
    """Alerts that mute an alert, directly or through another."""
    found: set[str] = set()
    news = {name}
    while news:
        news = {
            why
            for inhibition in INHIBITIONS
            if news & set(inhibition.targets) and not _of_one_budget(inhibition)
            for why in inhibition.sources
        } - found
        found |= news
    return found


def _of_one_budget(inhibition: Inhibition) -> bool:
    return inhibition.sources == inhibition.targets


def test_no_two_alerts_mute_each_other() -> None:
    for name in {rule["alert"] for rule in ALERTS}:
        assert name not in _above(name), name


def test_every_page_on_an_engine_mutes_alerts_on_its_objectives() -> None:
    pages = {rule["alert"] for rule in ALERTS if rule["labels"]["severity"] == "page"}
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
        return not self.muted and (self.severity != "none" or self.name == WATCHDOG)

    def posted(self) -> dict[str, Any]:
        """The same as Prometheus sends it."""
        return {
            "labels": {"alertname": self.name, "severity": self.severity, **self.labels},
            "annotations": {"summary": "s", "description": "d", "runbook_url": "http://r"},
        }


def _of(name: str, severity: str = "page", *, muted: bool = False, **labels: str) -> Sent:
    return Sent(name, severity, muted, labels)


def _engine(number: int, name: str, severity: str = "page", *, muted: bool, model: str) -> Sent:
    labels = {"instance": "a:9470", "engine": f"chat-{number}", "model": model}
    return Sent(name, severity, muted, labels)


def _gpu(number: int, name: str, *, muted: bool, **labels: str) -> Sent:
    return Sent(name, "page", muted, {"instance": "a:9470", "gpu": f"GPU-{number}", **labels})


def _vllm(port: int, name: str, severity: str = "page", *, muted: bool = True) -> Sent:
    on_model = {"instance": f"v:{port}", "model_name": "llama"}
    return Sent(name, severity, muted, {"instance": f"v:{port}"} if "Down" in name else on_model)


def _budget(model: str, name: str, severity: str, tier: str = "", *, muted: bool) -> Sent:
    labels = {"objective": "chat", "model": model}
    return Sent(name, severity, muted, {**labels, "tier": tier} if tier else labels)


_BURN = "LlmObjectiveBudgetBurn"
SENT = (
    _of(WATCHDOG, "none"),
    # A budget, and what its users feel.
    _budget("llama", _BURN, "page", "1", muted=False),
    _budget("llama", _BURN, "page", "2", muted=True),
    _budget("llama", _BURN, "ticket", "4", muted=True),
    _of(
        "LlmTtftOverLimit",
        "ticket",
        muted=True,
        **{"objective": "chat", "model": "llama", "instance": "a:9470", "engine": "chat-9"},
    ),
    # The queue is what makes it slow.
    _engine(9, "LlmQueueDeep", "ticket", muted=True, model="llama"),
    # An engine that died, one that is down, one that hangs.
    _engine(0, "LlmCudaOutOfMemory", muted=False, model="m0"),
    _engine(0, "LlmEngineDown", muted=True, model="m0"),
    _engine(0, "LlmEngineNeverUp", "ticket", muted=True, model="m0"),
    _engine(1, "LlmEngineDown", muted=False, model="m1"),
    _engine(2, "LlmEngineHanging", muted=False, model="m2"),
    _engine(2, "LlmRequestsTimingOut", "ticket", muted=True, model="m2"),
    _engine(2, "LlmQueueDeep", "ticket", muted=True, model="m2"),
    # One that turns requests away, and one before which somebody else does.
    _engine(3, "LlmAdmissionRejections", "ticket", muted=False, model="m3"),
    _engine(3, "LlmRequestsThrottled", "ticket", muted=True, model="m3"),
    _engine(3, "LlmErrorRatioOverLimit", "ticket", muted=True, model="m3"),
    _engine(4, "LlmRequestsThrottled", "ticket", muted=False, model="m4"),
    _engine(4, "LlmErrorRatioOverLimit", "ticket", muted=True, model="m4"),
    # Objectives that the page on an engine explains, and the ticket on what is left.
    _budget("m0", "LlmMissesExplained", "none", muted=False),
    _budget("m0", "LlmObjectiveOutage", "page", muted=True),
    _budget("m1", "LlmMissesExplained", "none", muted=False),
    _budget("m1", _BURN, "ticket", "3", muted=False),
    # One agent that was the only one.
    _of("LlmAgentDown", instance="a:9470", job="agents"),
    _of("LlmAgentsMissing", muted=True),
    _of("LlmObjectiveNotPublished", "ticket", muted=True, objective="chat"),
    _of("LlmAgentStoreFailing", "ticket", instance="b:9470", what="requests"),
    _of("LlmAgentStoreBehind", "ticket", muted=True, instance="b:9470"),
    _of("LlmAgentStageBehind", "ticket", muted=True, instance="b:9470", stage="fold"),
    _of("LlmAgentJobLate", "ticket", muted=True, instance="b:9470", job_name="settle requests"),
    _of("LlmAgentStageBehind", "ticket", instance="c:9470", stage="forward"),
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
    _vllm(8000, "VllmQueueDeep", "ticket"),
    _vllm(8000, "VllmTtftOverLimit", "ticket"),
    _vllm(8001, "VllmKvCacheSaturated", "ticket", muted=False),
    _vllm(8001, "VllmQueueDeep", "ticket"),
    _vllm(8002, "VllmQueueDeep", "ticket", muted=False),
)


def _key(labels: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(labels.items()))


def _config(url: str) -> str:
    receivers = Receivers(webhook=f"{url}/alerts", deadman=f"{url}/deadman")
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
        Alertmanager(tmp_path, _config(webhook.url)) as alertmanager,
    ):
        alertmanager.send([sent.posted() for sent in SENT])
        eventually(lambda: posted_names() >= expected, within_s=60, what="the alerts")
        eventually(lambda: is_muted() == muted, within_s=30, what="the muted alerts")
        assert posted_names() == expected
