"""The receivers of Alertmanager: only those that the operator configured."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PAGE, TICKET, DEADMAN = "page", "ticket", "deadman"
DEFAULT_SECRETS = "/etc/alertmanager/secrets"

_DETAILS = (
    "{{ range .Alerts }}*{{ .Annotations.summary }}*\n{{ .Annotations.description }}\n"
    "{{ if .Annotations.dashboard_url }}<{{ .Annotations.dashboard_url }}|DashboardUid> · {{ end }}"
    "<{{ .Annotations.runbook_url }}|Runbook>\n{{ end }}"
)
_TITLE = (
    '[{{ .Status | toUpper }}{{ if eq .Status "firing" }} {{ .Alerts.Firing | len }}{{ end }}] '
    "{{ .CommonLabels.alertname }}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receivers:
    """The receivers; None or False leaves one out.

    `slack_pages` and `slack_tickets` are channels. `webhook` is a URL that gets all alerts as JSON.
    `deadman` is the URL of an outside service that raises the alarm when the watchdog's messages
    stop. `secrets` is a folder on Alertmanager's machine with the files `pagerduty_routing_key`,
    `slack_api_url` and `webhook_token`; each is read only if it is used.
    """

    pagerduty: bool = False
    slack_pages: str | None = None
    slack_tickets: str | None = None
    webhook: str | None = None
    webhook_token: bool = False
    deadman: str | None = None
    secrets: str = DEFAULT_SECRETS

    def configured(self) -> list[dict[str, Any]]:
        """The receivers of all routes; Alertmanager sends nothing to an empty one."""
        return [
            {"name": PAGE, **self._pagerduty(), **self._slack(self.slack_pages), **self._webhook()},
            {"name": TICKET, **self._slack(self.slack_tickets), **self._webhook()},
            {"name": DEADMAN, **self._deadman()},
        ]

    def silences(self) -> Iterator[str]:
        """A sentence on each route without a receiver, with the option that sets one."""
        named = {receiver["name"] for receiver in self.configured() if len(receiver) > 1}
        for name, sentence in _SILENCES.items():
            if name not in named:
                yield sentence

    def _pagerduty(self) -> dict[str, Any]:
        config = {
            "routing_key_file": f"{self.secrets}/pagerduty_routing_key",
            "send_resolved": True,
            "severity": "critical",
            "description": "{{ .CommonLabels.alertname }}: "
            "{{ (index .Alerts 0).Annotations.summary }}",
            "client": "goodput-agent",
            "client_url": "{{ (index .Alerts 0).Annotations.dashboard_url }}",
            "links": [
                {"href": "{{ (index .Alerts 0).Annotations.runbook_url }}", "text": "Runbook"},
            ],
            "details": {"description": "{{ (index .Alerts 0).Annotations.description }}"},
        }
        return {"pagerduty_configs": [config]} if self.pagerduty else {}

    def _slack(self, channel: str | None) -> dict[str, Any]:
        config = {
            "api_url_file": f"{self.secrets}/slack_api_url",
            "channel": channel,
            "send_resolved": True,
            "title": _TITLE,
            "title_link": "{{ (index .Alerts 0).Annotations.dashboard_url }}",
            "text": _DETAILS,
        }
        return {"slack_configs": [config]} if channel else {}

    def _webhook(self) -> dict[str, Any]:
        config: dict[str, Any] = {"url": self.webhook, "send_resolved": True}
        if self.webhook_token:
            token = f"{self.secrets}/webhook_token"
            config["http_config"] = {"authorization": {"credentials_file": token}}
        return {"webhook_configs": [config]} if self.webhook else {}

    def _deadman(self) -> dict[str, Any]:
        # Often a third party's service, which must not see the webhook's token.
        config = {"url": self.deadman, "send_resolved": False}
        return {"webhook_configs": [config]} if self.deadman else {}


_SILENCES = {
    PAGE: "PAGES REACH NOBODY. Alertmanager only shows them on its own page: name a receiver with "
    "--pagerduty, --slack-pages or --webhook.",
    TICKET: "TICKETS REACH NOBODY. Alertmanager only shows them on its own page: name a receiver "
    "with --slack-tickets or --webhook.",
    DEADMAN: "NO DEAD MAN'S SWITCH. If Prometheus or Alertmanager stops, no alert arrives and "
    "nothing reports that: set --deadman to the URL of an outside service that raises the alarm "
    "when the message of each minute is missing.",
}
