"""The agent as a user starts it, and a small client of its HTTP API."""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import psutil
import requests
import yaml
from requests import Response

from tests.real_parts.ports import free_port
from tests.real_parts.processes import ServerProcess, answers
from tests.store.migrated import migrated_file

READY_WITHIN_S = 180.0
ANSWER_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPorts:
    """The three ports of one agent, the same after its restarts."""

    listen: int
    grpc: int
    http: int

    @classmethod
    def free(cls) -> Self:
        """Ports that nothing listens on."""
        return cls(listen=free_port(), grpc=free_port(), http=free_port())


class AgentApi:
    """Queries of the agent's HTTP API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def summary(self, **filters: str) -> dict[str, Any]:
        """The figures of a window, such as `window="5m"`."""
        response: dict[str, Any] = self.json("/api/v1/summary", filters)
        return response

    def breakdown(self, **filters: str) -> dict[str, Any]:
        """The figures of a window in groups, such as `by="tenant"`."""
        response: dict[str, Any] = self.json("/api/v1/breakdown", filters)
        return response

    def lengths(self, **filters: str) -> dict[str, Any]:
        """The verdicts of a window by input and output length."""
        response: dict[str, Any] = self.json("/api/v1/lengths", filters)
        return response

    def requests(self, **filters: str) -> list[dict[str, Any]]:
        """Every row that matches, of all pages."""
        return self.items("/api/v1/requests", filters)

    def request(self, request_id: str) -> Any:
        """The agent's response for one request id."""
        return self.json(f"/api/v1/requests/{request_id}", {})

    def events(self, **filters: str) -> list[dict[str, Any]]:
        """Every event that matches, of all pages."""
        return self.items("/api/v1/events", filters)

    def exposition(self, accept: str = "text/plain") -> str:
        """The exposition, in the format of this Accept header."""
        response = requests.get(
            f"{self.url}/metrics", headers={"Accept": accept}, timeout=ANSWER_WITHIN_S
        )
        response.raise_for_status()
        return response.text

    def items(self, path: str, filters: Mapping[str, str]) -> list[dict[str, Any]]:
        """The items of all pages of a route."""
        items: list[dict[str, Any]] = []
        cursor: dict[str, str] = {}
        while True:
            response = self.json(path, {**filters, **cursor})
            items += response["items"]
            if response["next"] is None:
                return items
            cursor = {"cursor": response["next"]}

    def json(self, path: str, parameters: Mapping[str, str]) -> Any:
        """The response of a route."""
        response = self._answer(path, parameters)
        response.raise_for_status()
        return response.json()

    def _answer(self, path: str, parameters: Mapping[str, str]) -> Response:
        """The agent's response, asked for again as long as it says when to ask again."""
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while True:
            response = requests.get(f"{self.url}{path}", params=parameters, timeout=ANSWER_WITHIN_S)
            again_s = response.headers.get("Retry-After")
            if again_s is None or time.monotonic() > deadline:
                return response
            time.sleep(float(again_s))


class AgentProcess:
    """One agent on fixed ports over one database; `start` returns when it is ready."""

    module: ClassVar[str] = "agent"
    # In a new interpreter also where tests could fork one that has imported it.
    anew: ClassVar[bool] = False

    def __init__(
        self,
        arguments: Sequence[str | Path],
        folder: Path,
        listen_port: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._arguments = [sys.executable, "-m", self.module, *arguments]
        self._log = folder / "agent.log"
        # Agents of other tests run beside it.
        self._environment = {"GOODPUT_AGENT_SOCKET": "none", **(environment or {})}
        self._make_tables(folder, (environment or {}).get("GOODPUT_STORAGE__FILE"))
        self._process: ServerProcess | None = None
        self.url = f"http://127.0.0.1:{listen_port}"
        self.api = AgentApi(self.url)

    @classmethod
    def _make_tables(cls, folder: Path, file: str | None) -> None:
        """Put a migrated database in the folder, if that is the agent's file.

        To migrate an empty one takes 0.15 s of a processor in each start. An agent that starts as a
        user starts it does so.
        """
        database = folder / "goodput.db"
        if not cls.anew and file == str(database) and not database.exists():
            database.write_bytes(migrated_file())

    @classmethod
    def with_settings(
        cls,
        folder: Path,
        ports: AgentPorts,
        settings: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """An agent with `--config`: its ports, its file in the folder, and `settings`."""
        config = folder / "agent.yml"
        content: dict[str, Any] = {**settings}
        for section, place in _places(folder, ports).items():
            content[section] = {**place, **content.get(section, {})}
        config.write_text(yaml.safe_dump(content))
        cls._make_tables(folder, content["storage"]["file"])
        return cls(["run", "--config", config], folder, ports.listen, environment)

    @classmethod
    def without_file(
        cls,
        folder: Path,
        ports: AgentPorts,
        engine_url: str,
        more: Mapping[str, str] | None = None,
    ) -> Self:
        """An agent with `--engine`, and with its ports and `more` from the environment."""
        environment = {
            f"GOODPUT_{section}__{key}".upper(): str(value)
            for section, place in _places(folder, ports).items()
            for key, value in place.items()
        }
        environment |= more or {}
        return cls(["run", "--engine", engine_url], folder, ports.listen, environment)

    def start(self) -> None:
        """Return when /readyz returns 200; PartFailed with the log's end if it never does."""
        self.start_until("/readyz")

    def start_until(self, path: str) -> None:
        """Return when a path returns 200, such as /healthz, which needs no store."""
        self._process = ServerProcess(
            self._arguments, self._log, environment=self._environment, anew=self.anew
        )
        try:
            self._process.wait_until(lambda: answers(f"{self.url}{path}"), within_s=READY_WITHIN_S)
        except BaseException:
            self.kill()
            raise

    @property
    def peak_mib(self) -> float:
        """The most memory that all processes of the agent ever had, in MiB.

        What they share now is counted once, as a container's limit does.
        """
        return sum(_peak_kib(each.pid) - _shared_kib(each.pid) for each in self._all()) / 1024

    @property
    def pid(self) -> int:
        """The process id of the running agent, without a supervisor and workers."""
        assert self._process is not None, "the agent runs"
        children = (child.pid for child in self.children() if _name(child) == "agent")
        return next(children, self._process.pid)

    def stop(self) -> None:
        """Send SIGTERM, like an orchestrator; an exit status other than 0 is a failure."""
        if self._process is not None:
            status = self._process.stop()
            self._process = None
            assert status == 0, f"the agent ended with {status}\n{self.log()}"

    def kill(self) -> None:
        """Kill it as kill -9 does."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def process(self, name: str) -> psutil.Process:
        """One of its processes: "agent" or "proxy worker 0"."""
        return next(child for child in self.children() if _name(child) == name)

    def _all(self) -> list[psutil.Process]:
        assert self._process is not None, "the agent was not started"
        return [psutil.Process(self._process.pid), *self.children()]

    def children(self) -> list[psutil.Process]:
        """The processes under its supervisor."""
        assert self._process is not None, "the agent was not started"
        return psutil.Process(self._process.pid).children()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process that was started."""
        assert self._process is not None, "the agent was not started"
        os.kill(self._process.pid, number)

    def log(self) -> str:
        """Everything that the agent logged, over all its starts."""
        return self._log.read_text(errors="replace")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _peak_kib(pid: int) -> int:
    return _kib(Path(f"/proc/{pid}/status"), "VmHWM:")


def _shared_kib(pid: int) -> int:
    """The part of its pages that other processes account for."""
    rollup = Path(f"/proc/{pid}/smaps_rollup")
    return _kib(rollup, "Rss:") - _kib(rollup, "Pss:")


def _kib(file: Path, name: str) -> int:
    lines = file.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


class AgentOfUser(AgentProcess):
    """An agent that starts as a user starts it."""

    anew = True


class HastyAgent(AgentProcess):
    """An agent whose minutes have five seconds."""

    module = "tests.real_parts.agent_in_haste"


def _places(folder: Path, ports: AgentPorts) -> dict[str, dict[str, Any]]:
    return {
        "listen": {"host": "127.0.0.1", "port": ports.listen},
        "otlp": {"grpc": f"127.0.0.1:{ports.grpc}", "http": f"127.0.0.1:{ports.http}"},
        "storage": {"file": str(folder / "goodput.db")},
    }
