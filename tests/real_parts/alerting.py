"""The rules on a real Prometheus, with Alertmanager and a webhook.

Everything runs at twenty times the speed, by `render --speed`; the rules are the same.
"""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.real_parts.alertmanager import Alertmanager
from tests.real_parts.prometheus import Prometheus
from tests.real_parts.waiting import eventually
from tests.real_parts.webhook import Webhook

SPEED, SCRAPE_INTERVAL_S = 20, 1
# Waits end with an event, so a busy machine only takes longer.
WITHIN_S = 240.0


class Alerting:
    """Prometheus and Alertmanager for these agents while the block lasts."""

    def __init__(self, folder: Path, settings: Path, agents: Sequence[str]) -> None:
        """The rules are those for `settings`; each of the `agents` is a host and a port."""
        self._folder, self._settings, self._agents = folder, settings, agents
        self.rules = folder / "alerts/goodput-agent.yml"
        self.webhook = Webhook()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.webhook)
            alertmanager = stack.enter_context(self._alertmanager())
            self.prometheus = stack.enter_context(self._prometheus(alertmanager.url))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def watch(self, times: int) -> None:
        """Return after this many more watchdog messages, which are a clock at this speed."""
        until = self._watchdogs() + times
        eventually(lambda: self._watchdogs() >= until, within_s=WITHIN_S, what="the watchdog")

    def _watchdogs(self) -> int:
        return len(self.webhook.alerts("/deadman"))

    def _render(self) -> Path:
        options: Sequence[object] = (
            *("--config", self._settings, "--into", self._folder),
            *("--speed", SPEED, "--scrape-interval", SCRAPE_INTERVAL_S),
            *("--webhook", f"{self.webhook.url}/alerts"),
            *("--deadman", f"{self.webhook.url}/deadman"),
        )
        command = [sys.executable, "-m", "agent", "render", *map(str, options)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return self._folder / "alerts"

    def _alertmanager(self) -> Alertmanager:
        config = self._render() / "alertmanager.yml"
        return Alertmanager(self._folder, config.read_text(encoding="utf-8"))

    def _prometheus(self, alertmanager: str) -> Prometheus:
        every = f"{SCRAPE_INTERVAL_S}s"
        config = {
            "global": {"scrape_interval": every, "scrape_timeout": every},
            "rule_files": [str(self.rules)],
            "scrape_configs": [
                {"job_name": "agents", "static_configs": [{"targets": list(self._agents)}]}
            ],
            "alerting": {
                "alertmanagers": [
                    {"static_configs": [{"targets": [alertmanager.removeprefix("http://")]}]}
                ]
            },
        }
        # An alert that fires before Alertmanager is found comes with the next sending.
        return Prometheus(self._folder, config, resend_s=60 // SPEED)
