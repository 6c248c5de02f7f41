"""Engines' plugins that share the agent's socket, and several agents on one machine."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.waiting import eventually

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

ROOT = Path(__file__).parents[1]
WITHIN_S = 60.0
VARIABLE = "GOODPUT_AGENT_SOCKET"


class Front:
    """A process that listens at an engine's port and sends what its plugin would."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def does(self, *words: str) -> None:
        """Report a request that `ended`, or begin one that stays `open`."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()


@contextmanager
def front(port: int, socket: Path) -> Iterator[Front]:
    command = [sys.executable, "-m", "tests.real_parts.plugin_front", str(port)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "plugins" / "vllm")])
    environment = {**os.environ, "PYTHONPATH": paths, VARIABLE: str(socket)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        yield Front(process)
        process.kill()


class Sharing:
    """An agent of several engines without a `plugin_socket`."""

    def __init__(self, agent: AgentProcess) -> None:
        self.agent = agent

    def metric(self, name: str, **labels: str) -> float | None:
        """The sum of these series; None while there is none."""
        try:
            return total(self.agent.api.exposition(), f"llm_engine_{name}", **labels)
        except KeyError:
            return None

    def status(self) -> str:
        """What /readyz says of the plugins."""
        response = requests.get(f"{self.agent.url}/readyz", timeout=WITHIN_S)
        assert response.status_code == 200
        return str(response.json()["parts"]["plugins"])

    def hears(self, engine: str, requests_: int) -> None:
        """Wait until so many requests came from an engine's plugin."""
        eventually(
            lambda: self.metric("plugin_records_total", engine=engine, kind="request") == requests_,
            within_s=WITHIN_S,
            what=f"{requests_} requests of {engine}",
        )


@contextmanager
def sharing(folder: Path, ports: Sequence[int], socket: Path) -> Iterator[Sharing]:
    folder.mkdir(exist_ok=True)
    engines: list[dict[str, Any]] = [
        {"name": f"chat-{number}", "url": f"http://127.0.0.1:{port}"}
        for number, port in enumerate(ports)
    ]
    settings = {"engines": engines, "nvml": {"enabled": False}}
    environment = {VARIABLE: str(socket)}
    agent = AgentProcess.with_settings(folder, AgentPorts.free(), settings, environment)
    with agent:
        yield Sharing(agent)


def test_each_record_is_of_the_engine_whose_process_sent_it(tmp_path: Path) -> None:
    ports, socket = [free_port(), free_port(), free_port()], tmp_path / "plugins" / "vllm.sock"
    with sharing(tmp_path, ports[:2], socket) as agent:
        assert (agent.status(), agent.metric("plugin_up")) == ("not configured", None)
        with front(ports[0], socket) as first, front(ports[1], socket) as second:
            second.does("ended", "chatcmpl-1")
            agent.hears("chat-1", 1)
            assert agent.metric("plugin_up", engine="chat-0") is None
            first.does("ended", "chatcmpl-2")
            first.does("ended", "chatcmpl-3")
            agent.hears("chat-0", 2)
            agent.hears("chat-1", 1)
            assert agent.status() == "ok"
            assert agent.metric("plugin_up") == 2
            second.does("open")
            eventually(
                lambda: agent.metric("open_requests", engine="chat-1") == 1,
                within_s=WITHIN_S,
                what="the open request",
            )
            pid = second.process.pid
            second.process.kill()
            ended = f"a front of engine chat-1 (process {pid}) ended with 1 open requests"
            eventually(lambda: ended in agent.agent.log(), within_s=WITHIN_S, what="its end")
        with front(ports[2], socket) as stranger:
            for number in range(3):
                stranger.does("ended", f"chatcmpl-{number}")
            dropped = {"engine": "unknown", "reason": "unknown_engine"}
            eventually(
                lambda: agent.metric("plugin_dropped_total", **dropped) == 6,
                within_s=WITHIN_S,
                what="the records of no engine",
            )
            assert agent.agent.log().count("is of no known engine") == 1
            agent.hears("chat-0", 2)


def test_a_second_agent_goes_without_until_the_first_has_ended(tmp_path: Path) -> None:
    port, socket = free_port(), tmp_path / "plugins" / "vllm.sock"
    with (
        sharing(tmp_path / "first", [port], socket) as first,
        sharing(tmp_path / "second", [port], socket) as second,
        front(port, socket) as engine,
    ):
        engine.does("ended", "chatcmpl-1")
        first.hears("chat-0", 1)
        assert second.status() == f"agent_socket: {socket} is the socket of another program"
        assert second.metric("plugin_up") is None
        first.agent.kill()
        eventually(
            lambda: second.status() == "not configured", within_s=WITHIN_S, what="the socket"
        )
        engine.does("ended", "chatcmpl-2")
        second.hears("chat-0", 1)
        assert second.status() == "ok"
