"""Who is told what: by amtool, and by a real Alertmanager that posts to a webhook."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.render.alerts import Links, Timings, render_alerts
from agent.render.alerts.alertmanager import INHIBITIONS
from agent.render.alerts.files import ALERTMANAGER, RULES
from tests.real_parts.alertmanager import Alertmanager, complaints_about_config, receivers_of
from tests.real_parts.waiting import eventually
from tests.real_parts.webhook import Webhook
from tests.render.alerts.cases import OBJECTIVES
from tests.render.alerts.cost_cases import BUDGET_USD
from tests.render.alerts.test_cases import PACKS

TEXT = render_alerts(OBJECTIVES)[ALERTMANAGER]
ALERTS = [
    rule
    for group in yaml.safe_load(render_alerts(OBJECTIVES, budget_usd=BUDGET_USD)[RULES])["groups"]
    for rule in group["rules"]
    if "alert" in rule
]
# The labels of each alert as its case shows them.
LABELS = {case.alert: set(case.labels) for pack in PACKS.values() for case in pack.cases}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "alertmanager.yml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_the_configuration_is_valid(config: Path) -> None:
    assert complaints_about_config(config) == ""


def test_the_tool_would_tell_what_is_not(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yml"
    path.write_text(TEXT.replace("receiver: ticket", "receiver: nobody"), encoding="utf-8")
    assert "nobody" in complaints_about_config(path)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: str(rule["alert"]))
def test_each_alert_goes_where_its_severity_says(rule: dict[str, Any], config: Path) -> None:
    severity = rule["labels"]["severity"]
    told = receivers_of(config, {"alertname": rule["alert"], "severity": severity})
    assert told == {"page": "page", "ticket": "ticket", "none": "deadman"}[severity]


def test_secrets_are_in_files_alone() -> None:
    held = yaml.safe_load(TEXT)["receivers"]
    keys = {
        key for key in json.dumps(held).replace('"', " ").split() if "key" in key or "api" in key
    }
    assert keys
    assert all("_file" in key or "/secrets/" in key for key in keys)
    assert "credentials_file" in TEXT


def test_what_mutes_and_what_is_muted_exists_and_has_the_labels_they_share() -> None:
    names = {rule["alert"] for rule in ALERTS}
    for inhibition in INHIBITIONS:
        for name in (*inhibition.why, *inhibition.what):
            assert name in names
            assert set(inhibition.same) <= LABELS[name], name
        # A label that both lack would count as equal, and an alert must not mute itself.
        assert not set(inhibition.why) & set(inhibition.what)


def _alert(name: str, severity: str, **labels: str) -> dict[str, Any]:
    return {
        "labels": {"alertname": name, "severity": severity, **labels},
        "annotations": {"summary": "s", "description": "d", "runbook_url": "http://r"},
    }


def _muted(alertmanager: Alertmanager) -> Mapping[str, bool]:
    found = {}
    for alert in alertmanager.alerts():
        labels = alert["labels"]
        name = f"{labels['alertname']} {labels.get('tier', labels.get('engine', ''))}"
        found[name.strip()] = bool(alert["status"]["inhibitedBy"])
    return found


_OURS = {"objective": "chat", "model": "llama"}
_HERE = {"instance": "a:9470", "engine": "chat-0"}
# Whether something that fires beside it explains it.
_SENT = [
    (_alert("Watchdog", "none"), "Watchdog", False),
    (
        _alert("LlmObjectiveBudgetBurn", "page", tier="1", **_OURS),
        "LlmObjectiveBudgetBurn 1",
        False,
    ),
    (_alert("LlmObjectiveBudgetBurn", "page", tier="2", **_OURS), "LlmObjectiveBudgetBurn 2", True),
    (
        _alert("LlmObjectiveBudgetBurn", "ticket", tier="4", **_OURS),
        "LlmObjectiveBudgetBurn 4",
        True,
    ),
    (_alert("LlmTtftOverLimit", "ticket", **_OURS, **_HERE), "LlmTtftOverLimit chat-0", True),
    # The queue is what makes it slow.
    (_alert("LlmQueueDeep", "ticket", model="llama", **_HERE), "LlmQueueDeep chat-0", True),
    (_alert("LlmCudaOutOfMemory", "page", **_HERE), "LlmCudaOutOfMemory chat-0", False),
    (_alert("LlmEngineDown", "page", **_HERE), "LlmEngineDown chat-0", True),
    (
        _alert("LlmEngineDown", "page", instance="a:9470", engine="chat-1"),
        "LlmEngineDown chat-1",
        False,
    ),
]
_PAGES = {"Watchdog", "LlmObjectiveBudgetBurn", "LlmCudaOutOfMemory", "LlmEngineDown"}


def _config(folder: Path, url: str) -> str:
    for secret in ("pagerduty_routing_key", "slack_api_url", "webhook_token"):
        # Nothing listens there, so nothing leaves this machine.
        (folder / secret).write_text("http://127.0.0.1:9/x", encoding="utf-8")
    links = Links(webhook=f"{url}/alerts", deadman=f"{url}/deadman", secrets=str(folder))
    document = yaml.safe_load(render_alerts(OBJECTIVES, Timings(speed=60), links)[ALERTMANAGER])
    for receiver in document["receivers"]:
        # PagerDuty's own address is on the internet.
        receiver.pop("pagerduty_configs", None)
    return yaml.safe_dump(document)


def test_a_page_arrives_and_mutes_what_it_explains(tmp_path: Path) -> None:
    expected = {name: muted for _, name, muted in _SENT}

    def told() -> set[str]:
        return {told.name for path in ("/alerts", "/deadman") for told in webhook.told(path)}

    with (
        Webhook() as webhook,
        Alertmanager(tmp_path, _config(tmp_path, webhook.url)) as alertmanager,
    ):
        alertmanager.send([alert for alert, _, _ in _SENT])
        eventually(lambda: told() >= _PAGES, within_s=60, what="the pages")
        eventually(lambda: _muted(alertmanager) == expected, within_s=30, what="the muted alerts")
        assert told() == _PAGES
