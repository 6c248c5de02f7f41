"""The real VictoriaMetrics, which `.ci/install-victoriametrics` keeps in a cache."""

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import requests

from tests.real_parts.ports import free_port
from tests.real_parts.processes import PartMissing, ServerProcess, answers

INSTALLER = Path(__file__).parents[2] / ".ci" / "install-victoriametrics"
READY_WITHIN_S = 180.0
ANSWER_WITHIN_S = 60.0


def _program() -> str:
    where = subprocess.run([INSTALLER, "--where"], capture_output=True, text=True, check=False)
    if where.returncode != 0:
        raise PartMissing(f"VictoriaMetrics is not installed: bash {INSTALLER}")
    return where.stdout.strip()


class VictoriaMetrics:
    """One server with its own storage, whose queries see everything that it accepted."""

    def __init__(self, folder: Path, *, prometheus_naming: bool) -> None:
        """With `prometheus_naming` it adds units and `_total` to names, as Prometheus does."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._process = ServerProcess(
            [
                _program(),
                f"-storageDataPath={folder / 'victoria'}",
                f"-httpListenAddr=127.0.0.1:{port}",
                "-retentionPeriod=100y",
                "-search.latencyOffset=0s",
                "-search.disableCache",
                "-memory.allowedBytes=64MB",
                f"-opentelemetry.usePrometheusNaming={str(prometheus_naming).lower()}",
            ],
            folder / "victoria.log",
        )

    @property
    def otlp(self) -> str:
        """Where it takes metrics over OTLP."""
        return f"{self.url}/opentelemetry/v1/metrics"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector of an expression, now: a list of `metric` and `value`."""
        requests.get(f"{self.url}/internal/force_flush", timeout=ANSWER_WITHIN_S)
        response = requests.get(
            f"{self.url}/api/v1/query", params={"query": expression}, timeout=ANSWER_WITHIN_S
        ).json()
        assert response["status"] == "success", response
        found: list[dict[str, Any]] = response["data"]["result"]
        return found

    def __enter__(self) -> Self:
        try:
            self._process.wait_until(lambda: answers(f"{self.url}/health"), within_s=READY_WITHIN_S)
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
