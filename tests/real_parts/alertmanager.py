"""A real Alertmanager, the webhook that receives from it, and Prometheus before both."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import requests

from tests.real_parts.ports import free_port
from tests.real_parts.processes import PartMissing, ServerProcess, answers
from tests.real_parts.prometheus import Prometheus
from tests.real_parts.waiting import eventually

READY_WITHIN_S = 180.0
ANSWER_WITHIN_S = 60.0
# Debian's own name first: `alertmanager` elsewhere.
_SERVERS = ("prometheus-alertmanager", "alertmanager")


def program(*names: str) -> str:
    """The path of the first of these programs that is installed."""
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return found
    raise PartMissing(f"{' or '.join(names)} is not installed: run .ci/install-parts")


class Alertmanager:
    """One Alertmanager alone with its own configuration and storage."""

    def __init__(self, folder: Path, config: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        settings = folder / "alertmanager.yml"
        settings.write_text(config, encoding="utf-8")
        self._process = ServerProcess(
            [
                program(*_SERVERS),
                f"--config.file={settings}",
                f"--storage.path={folder / 'alertmanager'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--cluster.listen-address=",
            ],
            folder / "alertmanager.log",
        )

    def send(self, alerts: Sequence[Mapping[str, Any]]) -> None:
        """Send alerts as Prometheus does: each with `labels` and perhaps `annotations`."""
        response = requests.post(
            f"{self.url}/api/v2/alerts", json=list(alerts), timeout=ANSWER_WITHIN_S
        )
        response.raise_for_status()

    def alerts(self) -> list[dict[str, Any]]:
        """The current alerts, each with its `status`: whether it is muted."""
        response = requests.get(f"{self.url}/api/v2/alerts", timeout=ANSWER_WITHIN_S)
        response.raise_for_status()
        found: list[dict[str, Any]] = response.json()
        return found

    def __enter__(self) -> Self:
        try:
            self._process.wait_until(
                lambda: answers(f"{self.url}/-/ready"), within_s=READY_WITHIN_S
            )
        except BaseException:
            self._process.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.stop()


def complaints_about_config(config: Path) -> str:
    """Complaints of `amtool check-config` about a configuration; empty when it is valid."""
    return _complaint([program("amtool"), "check-config", config])


def receivers_of(config: Path, labels: Mapping[str, str]) -> str:
    """The receivers of an alert with these labels, with commas between them."""
    finished = subprocess.run(
        [
            program("amtool"),
            "config",
            "routes",
            "test",
            f"--config.file={config}",
            *(f"{name}={value}" for name, value in labels.items()),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return finished.stdout.strip()


def _complaint(command: Sequence[str | Path]) -> str:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if finished.returncode == 0 else finished.stdout + finished.stderr


@dataclass(frozen=True, slots=True, kw_only=True)
class PostedAlert:
    """One alert of one message; `path` is where it was posted."""

    path: str
    name: str
    status: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


class Webhook:
    """Accepts every message and records its alerts in order."""

    def __init__(self) -> None:
        self._alerts: list[PostedAlert] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self._alerts))
        self._thread = threading.Thread(target=self._server.serve_forever, name="webhook")
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def alerts(self, path: str = "/alerts") -> list[PostedAlert]:
        """All alerts posted to this path until now."""
        return [alert for alert in tuple(self._alerts) if alert.path == path]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(recorded: list[PostedAlert]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            recorded.extend(_posted(self.path, alert) for alert in body["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing: the test reads the recorded alerts."""

    return Handler


def _posted(path: str, alert: Mapping[str, Any]) -> PostedAlert:
    return PostedAlert(
        path=path,
        name=alert["labels"]["alertname"],
        status=alert["status"],
        labels=alert["labels"],
        annotations=alert["annotations"],
    )


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
