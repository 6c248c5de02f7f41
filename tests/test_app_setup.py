"""The steps of an engine's setup, on the running agent."""

from pathlib import Path
from typing import Any

import requests

from agent.app.engine_setup import VersionReader
from agent.settings import EngineSettings
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.ports import free_port
from tests.real_parts.waiting import eventually
from tests.simulated import MODEL, WITHIN_S, Simulator, rows_in
from tests.sources.engines.wire import EngineServer


def steps(agent: AgentProcess) -> dict[str, dict[str, Any]]:
    """The steps of the only engine by name."""
    (engine,) = requests.get(f"{agent.url}/api/v1/setup", timeout=30).json()["items"]
    return {step["name"]: step for step in engine["steps"]}


def readiness(agent: AgentProcess) -> str:
    parts = requests.get(f"{agent.url}/readyz", timeout=30).json()["parts"]
    return str(parts["setup"])


def test_spans_are_asked_for_until_the_first_one_comes_and_are_known_after_a_restart(
    tmp_path: Path,
) -> None:
    ports = AgentPorts.free()
    command = (
        f"OTEL_SERVICE_NAME=engine-0 OTEL_TRACES_SAMPLER=always_on vllm serve {MODEL} "
        f"--otlp-traces-endpoint http://127.0.0.1:{ports.grpc}"
    )
    with Simulator(tmp_path, grpc=free_port()) as engine:
        with AgentProcess.without_file(tmp_path, ports, engine.url) as agent:
            assert steps(agent)["metrics"]["state"] == "done"
            (action,) = steps(agent)["spans"]["actions"]
            assert action["lines"] == [command]
            line = f"engine engine-0: metrics; for single requests restart vLLM with: {command}"
            eventually(lambda: line in agent.log(), within_s=WITHIN_S, what="the line in the log")
            assert readiness(agent) == "1 of 1 engines could show more: see /api/v1/setup"

            sender = tmp_path / "sender"
            sender.mkdir()
            with Simulator(sender, grpc=ports.grpc, service="engine-0"):
                rows_in(agent, 1)
            assert steps(agent)["spans"]["state"] == "done"
        with AgentProcess.without_file(tmp_path, ports, engine.url) as agent:
            line = "engine engine-0: metrics, spans; for plugin"
            eventually(lambda: line in agent.log(), within_s=WITHIN_S, what="the line in the log")
            assert steps(agent)["spans"]["state"] == "done"


def test_a_version_that_could_not_be_read_is_read_at_the_next_look_and_then_kept() -> None:
    versions = VersionReader(None)
    with EngineServer() as server:
        engine = EngineSettings(name="chat-0", url=server.url)
        versions.read(engine, 1.0)
        assert versions.of("chat-0") is None
        server.answers("/version", b'{"version": "0.32.0"}')
        for _ in range(2):
            versions.read(engine, 1.0)
            assert versions.of("chat-0") == "0.32.0"
        assert len(server.asked) == 2
