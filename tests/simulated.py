"""A simulated engine in a process of its own, the demo, and the rows that an agent makes."""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import yaml

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.processes import ServerProcess
from tests.real_parts.waiting import eventually

WITHIN_S = 120.0
MODEL = "simulated-quick"
# Milliseconds. A row that waits for its span is there soon.
SPANS_EVERY = {"OTEL_BSP_SCHEDULE_DELAY": "200"}

Row = dict[str, Any]


class Simulator:
    """A simulated engine, many times as fast as the default one, on a port of its own."""

    def __init__(
        self,
        folder: Path,
        *,
        grpc: int,
        service: str = "engine-0",
        port: int = 0,
        rate: float = 1,
        scenario: Mapping[str, Any] | None = None,
        access_log: bool = False,
        environment: Mapping[str, str] = SPANS_EVERY,
    ) -> None:
        """`scenario` overrides the default scenario."""
        self._scenario = folder / f"{service}.yml"
        self._environment = environment
        self.log = folder / f"{service}.log"
        default = {"model": MODEL, "arrival_rate": rate, "time_scale": 30.0, "abort_ratio": 0.0}
        self._scenario.write_text(yaml.safe_dump(default | dict(scenario or {})))
        self._options = [
            *("--port", str(port), "--scenario", str(self._scenario), "--service-name", service),
            *("--otlp", f"http://127.0.0.1:{grpc}"),
            *(["--access-log"] if access_log else []),
        ]

    def __enter__(self) -> Self:
        self.launch()
        self.listening()
        return self

    def launch(self) -> None:
        """Start its process without waiting."""
        command = [sys.executable, "-m", "agent.simulator", *self._options]
        self.process = ServerProcess(command, self.log, environment=self._environment)

    def listening(self) -> None:
        """Return when it listens."""
        self.process.wait_until(lambda: self._announced() is not None, within_s=WITHIN_S)
        self.url = str(self._announced())

    def _announced(self) -> str | None:
        found = re.search(r"simulator listening on (\S+)", self.log.read_text())
        return found[1] if found else None

    def __exit__(self, *_: object) -> None:
        # Its agent has mostly ended: a stop would try for seconds to send it the last spans.
        self.process.kill()


def rows_in(agent: AgentProcess, at_least: int, **filters: str) -> list[Row]:
    """The agent's rows, once it has this many."""

    def read() -> list[Row]:
        rows = agent.api.requests(limit="1000", **filters)
        return rows if len(rows) >= at_least else []

    return eventually(read, within_s=WITHIN_S, what=f"{at_least} rows")


@contextmanager
def demo(folder: Path, past: str = "30s", **environment: str) -> Iterator[AgentProcess]:
    ports = AgentPorts.free()
    environment = {
        "GOODPUT_LISTEN__PORT": str(ports.listen),
        "GOODPUT_OTLP__GRPC": f"127.0.0.1:{ports.grpc}",
        "GOODPUT_OTLP__HTTP": f"127.0.0.1:{ports.http}",
        "GOODPUT_STORAGE__FILE": str(folder / "goodput.db"),
        **environment,
    }
    with AgentProcess(["demo", "--past", past], folder, ports.listen, environment) as agent:
        yield agent
