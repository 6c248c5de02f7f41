"""A reload tries the new agent first: what cannot start changes nothing."""

import shutil
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import requests
import yaml

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.ports import free_port
from tests.real_parts.processes import ServerProcess, answers
from tests.real_parts.waiting import eventually

WITHIN_S = 120.0
ROOT = Path(__file__).parents[1]
# The program of a folder that a test may damage.
PROGRAM = """
import runpy, sys
sys.path.insert(0, {folder!r})
runpy.run_module("agent", run_name="__main__", alter_sys=True)
"""
NOTHING_CHANGES = "the new agent cannot start, so nothing changes: "


class Reloaded:
    """A running agent with a proxy, its settings, and its program."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "program"
        for part in ("agent", "migrations", "docs"):
            shutil.copytree(ROOT / part, self.program / part)
        self._config = folder / "agent.yml"
        self._log = folder / "agent.log"
        self.port = free_port()
        self.settings: dict[str, Any] = {
            "listen": {"port": self.port},
            "otlp": {"grpc": None, "http": f"127.0.0.1:{free_port()}"},
            "engines": [{"name": "chat-0", "url": "http://127.0.0.1:9"}],
            "proxy": {"listen": f"127.0.0.1:{free_port()}", "workers": 1},
            "storage": {"file": str(folder / "goodput.db")},
            "nvml": {"enabled": False},
        }
        self.write(self.settings)
        program = PROGRAM.format(folder=str(self.program))
        run: list[str | Path] = [sys.executable, "-c", program, "run", "--config", self._config]
        self.process = ServerProcess(run, self._log)
        self.process.wait_until(self.is_up, within_s=WITHIN_S)

    def is_up(self) -> bool:
        return answers(f"http://127.0.0.1:{self.port}/healthz")

    def write(self, settings: object) -> None:
        """Write the settings file."""
        self._config.write_text(yaml.safe_dump(settings))

    def processes(self) -> set[tuple[int, float]]:
        """All processes by id and start, without one that is tried."""
        first = psutil.Process(self.process.pid)
        children = (child for child in first.children() if not child.name().startswith("python"))
        return {(each.pid, each.create_time()) for each in (first, *children)}

    def problem_after_reload(self) -> str:
        """Why the reload changed nothing, by the log."""
        before = self._log.read_text().count(NOTHING_CHANGES)
        psutil.Process(self.process.pid).send_signal(signal.SIGHUP)

        def problems() -> list[str]:
            return self._log.read_text().split(NOTHING_CHANGES)[1:][before:]

        problem = eventually(problems, within_s=WITHIN_S, what="the reason of the trial")[0]
        return problem.splitlines()[0]


def name_at(port: int) -> str:
    """The name of the agent at this port, by its metrics; empty while it is away."""
    with suppress(requests.RequestException):
        text = requests.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
        return text.partition('llm_agent_info{agent="')[2].partition('"')[0]
    return ""


def test_an_agent_without_a_proxy_becomes_the_one_of_its_new_settings(tmp_path: Path) -> None:
    ports, engine = AgentPorts.free(), {"name": "chat-0", "url": "http://127.0.0.1:9"}
    with AgentProcess.with_settings(tmp_path, ports, {"engines": [engine]}) as agent:
        before, config = agent.pid, tmp_path / "agent.yml"
        config.write_text(f"name: renamed\n{config.read_text()}")
        agent.send_signal(signal.SIGHUP)
        renamed = partial(name_at, ports.listen)
        eventually(lambda: renamed() == "renamed", within_s=WITHIN_S, what="the new name")
        # It is the same process, so that whoever supervises it sees nothing.
        assert agent.pid == before


def test_what_cannot_start_changes_nothing_and_a_reload_brings_what_can(tmp_path: Path) -> None:
    agent = Reloaded(tmp_path)
    first = psutil.Process(agent.process.pid)
    with agent.process:
        before = agent.processes()
        rules = agent.program / "agent/analysis/causes/rules.py"
        content = rules.read_text()
        rules.write_text("def (")
        invalid = f'SyntaxError: invalid syntax (File "{rules}"'
        assert invalid in agent.problem_after_reload()
        rules.write_text(content)
        socket = tmp_path / "no folder" / "below" / "x.sock"
        (engine,) = agent.settings["engines"]
        agent.write({**agent.settings, "engines": [{**engine, "plugin_socket": str(socket)}]})
        cannot_listen = f"plugin_socket of engine chat-0: cannot listen at {socket}"
        assert cannot_listen in agent.problem_after_reload()
        assert agent.is_up()
        assert agent.processes() == before
        agent.write({**agent.settings, "name": "renamed"})
        first.send_signal(signal.SIGHUP)
        renamed = partial(name_at, agent.port)
        eventually(lambda: renamed() == "renamed", within_s=WITHIN_S, what="the new name")
        assert first.is_running()
        first.terminate()
        assert agent.process.wait(within_s=WITHIN_S) == 0
