"""A whole site: simulated engines, agents, Prometheus and Alertmanager."""

import os
import signal
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import requests
import yaml

from agent.sources.host.cgroups import parse_cgroup_path
from tests.real_parts.agent_process import AgentOfUser, AgentPorts, AgentProcess
from tests.real_parts.alertmanager import Alerting
from tests.real_parts.ports import free_port
from tests.real_parts.processes import answers
from tests.real_parts.waiting import eventually
from tests.simulated import WITHIN_S, Simulator
from tests.sources.host.machine import PaperMachine
from tests.sources.nvml.fake_driver import build

GPUS = 3
CALM = {
    "time_scale": 1.0,
    "arrival_rate": 2.0,
    "input_tokens": {"median": 50, "sigma": 0.2, "min": 10, "max": 80},
    "output_tokens": {"median": 30, "sigma": 0.2, "min": 10, "max": 80},
    "max_model_len": 1000,
    "max_num_seqs": 16,
    "kv_cache": {"blocks": 400, "block_tokens": 10},
}
# Short requests, and enough of them for a stable ratio within seconds.
PROMISED = {
    **CALM,
    "arrival_rate": 5.0,
    "output_tokens": {"median": 4, "sigma": 0.2, "min": 2, "max": 8},
    "max_num_seqs": 64,
}
# At this speed, spans batched for five seconds would be those of almost two minutes.
SPANS_EVERY = {"OTEL_BSP_SCHEDULE_DELAY": "1000"}


def model_of(engine: str) -> str:
    """The name of the model that an engine serves."""
    return f"simulated-{engine}"


class AgentOnPaper(AgentProcess):
    """An agent that reads cgroups from the files of a test."""

    module = "tests.end_to_end.agent_on_paper"


class SimulatedEngine:
    """A simulated engine with faults on demand."""

    def __init__(self, folder: Path, name: str, *, grpc: int, with_objective: bool) -> None:
        self.port = free_port()
        self.name = name
        self.simulator = Simulator(
            folder,
            grpc=grpc,
            service=name,
            port=self.port,
            scenario={**(PROMISED if with_objective else CALM), "model": model_of(name)},
            access_log=True,
            environment=SPANS_EVERY,
        )
        self.url = f"http://127.0.0.1:{self.port}"

    def fail(self, **fault: float | bool) -> None:
        """Set the faults from now on; without arguments there are none."""
        requests.put(f"{self.url}/simulator/fault", json=fault, timeout=10).raise_for_status()

    def launch(self) -> None:
        """Start or restart it without waiting."""
        self.simulator.launch()

    def wait_until_up(self) -> None:
        """Return when its health check succeeds."""
        eventually(lambda: answers(f"{self.url}/health"), within_s=WITHIN_S, what=self.name)

    def stop(self) -> None:
        """Stop it as an orchestrator does."""
        self.simulator.process.stop()

    def kill(self) -> None:
        """Kill it as kill -9 does."""
        self.simulator.process.kill()

    def send(self, signum: int) -> None:
        """Send its process a signal."""
        os.kill(self.simulator.process.pid, signum)


class MistakenClient:
    """Asks the proxy for a model that does not exist, several times a second, while it runs."""

    MODEL = "simulated-typo"

    def __init__(self, proxy: str) -> None:
        self._url = f"http://{proxy}/v1/completions"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mistaken client", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Return when it asks no more."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(0.25):
            with suppress(requests.RequestException):
                requests.post(self._url, json={"model": self.MODEL, "prompt": "hi"}, timeout=10)


class Site:
    """The site while the block lasts. Each of the `engines` has an objective with these
    settings, or none."""

    def __init__(
        self,
        folder: Path,
        engines: Mapping[str, Mapping[str, Any] | None],
        roles: Mapping[str, str],
    ) -> None:
        """The agent reads the `log` of one engine, another is on the first `gpu`, one in a `cgroup`
        on paper, one behind its `proxy`, and the one `apart` has an agent of its own."""
        self._folder = folder
        self._apart = roles["apart"]
        self._ports, self._other_ports = AgentPorts.free(), AgentPorts.free()
        self.engines = {
            name: SimulatedEngine(
                folder,
                name,
                grpc=(self._other_ports if name == self._apart else self._ports).grpc,
                with_objective=objective is not None,
            )
            for name, objective in engines.items()
        }
        self._objectives = {name: own for name, own in engines.items() if own is not None}
        self.agents = f"127.0.0.1:{self._ports.listen}", f"127.0.0.1:{self._other_ports.listen}"
        self._behind_proxy, self._proxy = roles["proxy"], f"127.0.0.1:{free_port()}"
        self.mistaken_client = MistakenClient(self._proxy)
        self._logged, self._gpu, self._caged = roles["log"], roles["gpu"], roles["cgroup"]
        self._paper = PaperMachine(folder)
        self._pipe = folder / "driver.pipe"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for engine in self.engines.values():
                engine.launch()
                stack.callback(engine.kill)
            for engine in self.engines.values():
                engine.wait_until_up()
            # The source keeps the cgroup that it finds first.
            self.kernel_killed(self._caged, 0)
            self.agent = self._agent()
            self.other_agent = self._other_agent()
            for agent in (self.agent, self.other_agent):
                agent.start()
                stack.callback(agent.kill)
            settings = self._folder / "agent.yml"
            self.alerting = stack.enter_context(Alerting(self._folder, settings, self.agents))
            stack.callback(self.mistaken_client.stop)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def drive(self, line: str) -> None:
        """Run a line of script.c in the driver of the GPUs."""
        with self._pipe.open("w") as pipe:
            pipe.write(f"{line}\n")

    def kernel_killed(self, engine: str, kills: int) -> None:
        """Set the count of OOM kills in the cgroup of an engine."""
        pid = self.engines[engine].simulator.process.pid
        at = parse_cgroup_path(Path(f"/proc/{pid}/cgroup").read_text())
        assert at is not None
        write = {1: self._paper.cgroup_v1, 2: self._paper.cgroup_v2}[at.version]
        write(at.path, (pid,), kills=kills)

    def _agent(self) -> AgentProcess:
        build(self._folder)
        os.mkfifo(self._pipe)
        environment = {
            "LD_LIBRARY_PATH": str(self._folder),
            "STANDIN_GPUS": str(GPUS),
            "STANDIN_PIPE": str(self._pipe),
            "PAPER_CGROUPS": str(self._paper.cgroups),
        }
        watched = [
            self._engine_settings(engine)
            for name, engine in self.engines.items()
            if name != self._apart
        ]
        proxy = {"listen": self._proxy, "engine": self._behind_proxy, "join_wait": "1s"}
        config = self._settings("agent", self._ports, {"engines": watched, "proxy": proxy})
        arguments: list[str | Path] = ["run", "--config", config]
        return AgentOnPaper(arguments, self._folder, self._ports.listen, environment)

    def _engine_settings(self, engine: SimulatedEngine) -> dict[str, Any]:
        settings: dict[str, Any] = {"name": engine.name, "url": engine.url}
        settings |= {"scrape_interval": "1s", "hang_after": "3s"}
        if engine.name == self._logged:
            settings["log"] = str(engine.simulator.log)
        if engine.name == self._gpu:
            settings["gpus"] = [0]
        return settings

    def _other_agent(self) -> AgentProcess:
        folder = self._folder / "other"
        folder.mkdir()
        settings = {
            "nvml": {"enabled": False},
            "engines": [self._engine_settings(self.engines[self._apart])],
        }
        config = self._settings("other", self._other_ports, settings)
        return AgentOfUser(["run", "--config", config], folder, self._other_ports.listen)

    def _settings(self, name: str, ports: AgentPorts, settings: Mapping[str, Any]) -> Path:
        settings = {
            "name": name,
            "listen": {"host": "127.0.0.1", "port": ports.listen},
            "otlp": {"grpc": f"127.0.0.1:{ports.grpc}", "http": f"127.0.0.1:{ports.http}"},
            "storage": {"file": f"{self._folder / name}.db"},
            "objectives": [
                {
                    "name": name,
                    "match": {"model": model_of(name)},
                    "ttft_ms": 200,
                    "tpot_ms": 500,
                    **objective,
                }
                for name, objective in self._objectives.items()
            ],
            **settings,
        }
        path = self._folder / f"{name}.yml"
        path.write_text(yaml.safe_dump(settings))
        return path


STOP, GO_ON = signal.SIGSTOP, signal.SIGCONT
