"""Prometheus from Debian: a real server, and promtool's checks of an exposition."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import requests
import yaml

from tests.real_parts.ports import free_port
from tests.real_parts.processes import PartMissing, ServerProcess, answers

READY_WITHIN_S = 180.0
ANSWER_WITHIN_S = 60.0


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise PartMissing(f"{name} is not installed: run .ci/install-parts")
    return found


class Prometheus:
    """One Prometheus with its own configuration and storage, exemplars and `features` included."""

    def __init__(
        self, folder: Path, config: Mapping[str, Any], *features: str, resend_s: int = 60
    ) -> None:
        """A firing alert is sent again after `resend_s`: 60 is Prometheus's default."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        settings = folder / "prometheus.yml"
        settings.write_text(yaml.safe_dump(dict(config)))
        self._process = ServerProcess(
            [
                _program("prometheus"),
                f"--config.file={settings}",
                f"--storage.tsdb.path={folder / 'prometheus'}",
                f"--web.listen-address=127.0.0.1:{port}",
                f"--enable-feature={','.join(('exemplar-storage', *features))}",
                f"--rules.alert.resend-delay={resend_s}s",
            ],
            folder / "prometheus.log",
        )

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector of an expression, now: a list of `metric` and `value`."""
        response: list[dict[str, Any]] = self._data("query", query=expression)["result"]
        return response

    def rule_errors(self) -> dict[str, str]:
        """The errors of rules that cannot be evaluated; `unknown` ones are not tried yet."""
        return {
            rule["name"]: rule.get("lastError") or rule["health"]
            for group in self._data("rules")["groups"]
            for rule in group["rules"]
            if rule["health"] != "ok"
        }

    def exemplars(self, expression: str) -> list[dict[str, Any]]:
        """The stored exemplars of the series of an expression, of any time."""
        found: list[dict[str, Any]] = self._data(
            "query_exemplars", query=expression, start="0", end="32503680000"
        )
        return [exemplar for series in found for exemplar in series["exemplars"]]

    def _data(self, endpoint: str, **parameters: str) -> Any:
        response = requests.get(
            f"{self.url}/api/v1/{endpoint}", params=parameters, timeout=ANSWER_WITHIN_S
        ).json()
        assert response["status"] == "success", response
        return response["data"]

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


def scrape_of(job: str, url: str, *, every: str = "1s") -> dict[str, Any]:
    """The configuration of a Prometheus that scrapes one server at this address."""
    target = url.removeprefix("http://")
    return {
        "global": {"scrape_interval": every, "scrape_timeout": every},
        "scrape_configs": [{"job_name": job, "static_configs": [{"targets": [target]}]}],
    }


def complaints_about(page: str) -> list[str]:
    """Complaints of `promtool check metrics` about an exposition; empty when clean."""
    verdict = subprocess.run(
        [_program("promtool"), "check", "metrics"],
        input=page,
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = (verdict.stdout + verdict.stderr).splitlines()
    assert complaints or verdict.returncode == 0, verdict
    return complaints
