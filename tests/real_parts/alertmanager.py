"""Alertmanager from Debian: a real server, and amtool's checks of a file."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import requests

from tests.real_parts.ports import free_port
from tests.real_parts.processes import PartMissing, ServerProcess, answers

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
