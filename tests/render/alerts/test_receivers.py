"""Alertmanager's configuration for each choice of receivers."""

import json
import queue
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any, Self

import pytest
import requests
import yaml
from prometheus_client.parser import text_string_to_metric_families

from agent.render.alerts import Receivers, Timings, render_alerts
from agent.render.alerts.alert_files import ALERTMANAGER
from agent.render.alerts.alertmanager import alertmanager
from agent.render.yaml_text import yaml_text
from tests.real_parts.alertmanager import Alertmanager, complaints_about_config
from tests.render.alerts.cases import OBJECTIVES

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


def kinds_by_receiver(receivers: Receivers) -> dict[str, set[str]]:
    """The kinds of integrations by receiver."""
    return {
        receiver["name"]: {key.removesuffix("_configs") for key in receiver.keys() - {"name"}}
        for receiver in receivers.configured()
    }


def receiver(name: str, receivers: Receivers = EVERYONE) -> dict[str, Any]:
    (found,) = (found for found in receivers.configured() if found["name"] == name)
    return found


@pytest.mark.parametrize(
    "chosen",
    # Nobody, each one alone, all but one, and all: amtool takes a while for each.
    [chosen for chosen in COMBINATIONS if len(chosen) in (0, 1, len(CHOICES) - 1, len(CHOICES))],
    ids=lambda chosen: "+".join(chosen) or "none",
)
def test_alertmanager_accepts_every_choice(chosen: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "alertmanager.yml"
    document = alertmanager(Timings(), Receivers(**chosen))
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
        assert kinds_by_receiver(Receivers(**chosen)) == expected
        silent = {name for name, kinds in expected.items() if not kinds}
        said = " ".join(Receivers(**chosen).silences())
        words = {
            "page": "PAGES REACH",
            "ticket": "TICKETS REACH",
            "deadman": "NO DEAD MAN'S SWITCH",
        }
        assert {name for name, word in words.items() if word in said} == silent


def test_by_default_nothing_is_sent() -> None:
    text = render_alerts(OBJECTIVES)[ALERTMANAGER]
    assert [list(receiver) for receiver in yaml.safe_load(text)["receivers"]][:3] == [["name"]] * 3
    assert not re.search("_file|_configs|url", text)


def test_only_a_receiver_in_use_needs_its_secret() -> None:
    def files(**chosen: Any) -> set[str]:
        return set(re.findall(r"'\w+_file': '(.+?)'", str(Receivers(**chosen).configured())))

    folder = "/etc/alertmanager/secrets"
    assert files(slack_tickets="#t") == {f"{folder}/slack_api_url"}
    assert files(pagerduty=True, secrets="/s") == {"/s/pagerduty_routing_key"}
    assert files(webhook="https://w.test", deadman="https://d.test") == set()
    assert files(webhook="https://w.test", webhook_token=True) == {f"{folder}/webhook_token"}


def test_each_route_has_its_own_channel() -> None:
    channels = [receiver(name)["slack_configs"][0]["channel"] for name in ("page", "ticket")]
    assert channels == ["#pages", "#tickets"]


def test_the_token_of_the_webhook_is_sent_to_the_webhook_alone() -> None:
    (webhook,) = receiver("ticket")["webhook_configs"]
    assert webhook["http_config"]["authorization"] == {"credentials_file": "/s/webhook_token"}
    (deadman,) = receiver("deadman")["webhook_configs"]
    assert deadman == {"url": "https://d.test/ping", "send_resolved": False}


def test_secrets_are_in_files_alone() -> None:
    words = re.findall(r"'(\w*(?:key|api|credentials)\w*)':", str(EVERYONE.configured()))
    assert len(words) >= 4
    assert all(word.endswith("_file") for word in words)


# For real


class Slack:
    """Takes Slack's messages and remembers their channels, as long as the block lasts."""

    def __enter__(self) -> Self:
        channels = self.channels = queue.Queue[str]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                channels.put(body["channel"])
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, format: str, *args: object) -> None:
                """Logs nothing: the test reads the recorded messages."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="slack")
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/services/x"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def deliveries(alertmanager: Alertmanager) -> dict[str, float]:
    """How many messages were sent, given up, or failed at one try."""
    page = requests.get(f"{alertmanager.url}/metrics", timeout=30).text
    return {
        name: sum(
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == f"alertmanager_{name}_total"
        )
        for name in ("notifications", "notifications_failed", "notification_requests_failed")
    }


def test_with_slack_alone_every_alert_arrives_there(tmp_path: Path) -> None:
    receivers = Receivers(slack_pages="#pages", slack_tickets="#tickets", secrets=str(tmp_path))
    config = render_alerts(OBJECTIVES, Timings(speed=60), receivers=receivers)[ALERTMANAGER]
    with Slack() as slack:
        (tmp_path / "slack_api_url").write_text(slack.url, encoding="utf-8")
        with Alertmanager(tmp_path, config) as alertmanager:
            for name, severity in (("Watchdog", "none"), ("A", "page"), ("B", "ticket")):
                labels = {"alertname": name, "severity": severity}
                alertmanager.send([{"labels": labels, "annotations": {"summary": name}}])
            channels = {slack.channels.get(timeout=60) for _ in range(2)}
            assert channels == {"#pages", "#tickets"}
            sent = deliveries(alertmanager)
    assert sent.pop("notifications") >= 2
    assert sum(sent.values()) == 0
