"""A reload tries the new agent first: what cannot start changes nothing."""

import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import yaml

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
    """A running agent, its settings, and its program."""

    def __init__(self, folder: Path, sections: Mapping[str, Any]) -> None:
        self.program = folder / "program"
        for part in ("agent", "migrations", "docs"):
            shutil.copytree(ROOT / part, self.program / part)
        self._config = folder / "agent.yml"
        self._log = folder / "agent.log"
        self._port = free_port()
        self.settings: dict[str, Any] = {
            "listen": {"port": self._port},
            "otlp": {"grpc": None, "http": f"127.0.0.1:{free_port()}"},
            "engines": [{"name": "chat-0", "url": "http://127.0.0.1:9"}],
            "storage": {"file": str(folder / "goodput.db")},
            "nvml": {"enabled": False},
            **sections,
        }
        self.write(self.settings)
        program = PROGRAM.format(folder=str(self.program))
        run: list[str | Path] = [sys.executable, "-c", program, "run", "--config", self._config]
        self.process = ServerProcess(run, self._log)
        self.process.wait_until(self.is_up, within_s=WITHIN_S)

    def is_up(self) -> bool:
        return answers(f"http://127.0.0.1:{self._port}/healthz")

    def write(self, settings: object) -> None:
        """Write the settings file."""
        self._config.write_text(yaml.safe_dump(settings))

    def with_engine(self, **fields: object) -> dict[str, Any]:
        """The settings with more fields of the engine."""
        return {**self.settings, "engines": [{**self.settings["engines"][0], **fields}]}

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

    def name(self) -> str:
        """The agent's own name, by its metrics; empty while it is away."""
        with suppress(requests.RequestException):
            text = requests.get(f"http://127.0.0.1:{self._port}/metrics", timeout=10).text
            return text.partition('llm_agent_info{agent="')[2].partition('"')[0]
        return ""


def proxied() -> Mapping[str, Any]:
    return {"proxy": {"listen": f"127.0.0.1:{free_port()}", "workers": 1}}


@pytest.fixture(params=[dict, proxied], ids=["without a proxy", "with a proxy"])
def reloaded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reloaded]:
    agent = Reloaded(tmp_path, request.param())
    with agent.process:
        yield agent


def test_what_cannot_start_changes_nothing_and_a_reload_brings_what_can(
    reloaded: Reloaded, tmp_path: Path
) -> None:
    # The same program tries the settings with a proxy and without.
    if "proxy" in reloaded.settings:
        what_cannot_start_changes_nothing(reloaded, tmp_path)
    first = psutil.Process(reloaded.process.pid)
    reloaded.write({**reloaded.settings, "name": "renamed"})
    first.send_signal(signal.SIGHUP)
    eventually(lambda: reloaded.name() == "renamed", within_s=WITHIN_S, what="the new name")
    # It is the same process, so that whoever supervises it sees nothing.
    assert first.is_running()
    first.terminate()
    assert reloaded.process.wait(within_s=WITHIN_S) == 0


def what_cannot_start_changes_nothing(reloaded: Reloaded, folder: Path) -> None:
    """The log says why."""
    rules = reloaded.program / "agent/analysis/causes/rules.py"
    socket, no_token = folder / "no folder" / "below" / "x.sock", folder / "no token"
    with_tokens = {**reloaded.settings, "security": {"read_tokens": str(no_token)}}
    faults: list[tuple[Callable[[], object], str]] = [
        (partial(rules.write_text, "def ("), f'SyntaxError: invalid syntax (File "{rules}"'),
        (partial(reloaded.write, with_tokens), f"security.read_tokens: {no_token} cannot be read"),
        (
            partial(reloaded.write, reloaded.with_engine(plugin_socket=str(socket))),
            f"plugin_socket of engine chat-0: cannot listen at {socket}",
        ),
    ]
    before, content = reloaded.processes(), rules.read_text()
    for fault, problem in faults:
        fault()
        assert problem in reloaded.problem_after_reload()
        assert reloaded.is_up()
        reloaded.write(reloaded.settings)
        rules.write_text(content)
    assert reloaded.processes() == before
