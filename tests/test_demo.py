"""The demo: an agent and a labelled simulated engine that start and end together."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from agent.demo import EXTRA_PACKAGES
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.chromium import shown
from tests.real_parts.ports import free_port
from tests.real_parts.processes import ServerProcess
from tests.simulated import WITHIN_S, rows_in

ROOT = Path(__file__).parents[1]


@contextmanager
def demo(folder: Path, **environment: str) -> Iterator[AgentProcess]:
    ports = AgentPorts.free()
    environment = {
        "GOODPUT_LISTEN__PORT": str(ports.listen),
        "GOODPUT_OTLP__GRPC": f"127.0.0.1:{ports.grpc}",
        "GOODPUT_OTLP__HTTP": f"127.0.0.1:{ports.http}",
        "GOODPUT_STORAGE__URL": f"sqlite:///{folder / 'goodput.db'}",
        **environment,
    }
    with AgentProcess(["demo"], folder, ports.listen, environment) as agent:
        yield agent


def simulators(folder: Path) -> list[int]:
    """The simulators that a demo of this folder started, by process id."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "environ"])
        if "agent.simulator" in (process.info["cmdline"] or ())
        and str(folder) in (process.info["environ"] or {}).get("GOODPUT_STORAGE__URL", "")
    ]


def test_the_demo_labels_its_simulation_everywhere(tmp_path: Path) -> None:
    with demo(tmp_path) as agent:
        rows = rows_in(agent, 3)
        summary, metrics = agent.api.summary(), agent.api.exposition()
        page = shown(agent.url, "Why requests missed")
        assert len(simulators(tmp_path)) == 1
    assert summary["simulated"] is True
    assert 'simulated="true"' in metrics
    assert "SIMULATED: these figures come from the" in page
    assert "SIMULATED: " in agent.log()
    for row in rows:
        assert row["engine"] == "simulator"
        assert "simulated" in row["model"]
    # The agent ended with exit code 0, and its simulator with it.
    assert simulators(tmp_path) == []
    assert "Traceback" not in agent.log()


def test_the_demo_shows_requests_without_grpc_as_well(tmp_path: Path) -> None:
    with demo(tmp_path, GOODPUT_OTLP__GRPC="null") as agent:
        assert rows_in(agent, 1)


def test_the_demo_sends_its_spans_with_a_token_where_one_is_needed(tmp_path: Path) -> None:
    (tmp_path / "ingest").write_text("token-of-the-demo")
    with demo(tmp_path, GOODPUT_SECURITY__INGEST_TOKENS=str(tmp_path / "ingest")) as agent:
        assert rows_in(agent, 1)


def test_a_demo_that_is_stopped_while_it_starts_leaves_no_simulator(tmp_path: Path) -> None:
    environment = {"GOODPUT_STORAGE__URL": f"sqlite:///{tmp_path}/goodput.db"}
    command = [sys.executable, "-m", "agent", "demo"]
    process = ServerProcess(command, tmp_path / "log", environment=environment)
    try:
        process.wait_until(lambda: bool(simulators(tmp_path)), within_s=WITHIN_S)
        psutil.Process(process.pid).terminate()
        assert process.wait(within_s=WITHIN_S) == 0
        assert simulators(tmp_path) == []
    finally:
        process.kill()


def test_simulated_rows_go_to_a_file_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ports = AgentPorts.free()
    environment = {
        "GOODPUT_LISTEN__PORT": str(ports.listen),
        "GOODPUT_OTLP__GRPC": f"127.0.0.1:{ports.grpc}",
        "GOODPUT_OTLP__HTTP": f"127.0.0.1:{ports.http}",
    }
    with AgentProcess(["demo"], tmp_path, ports.listen, environment) as agent:
        assert rows_in(agent, 1)
    assert {path.name for path in tmp_path.glob("*.db")} == {"goodput-demo.db"}


# Without the extra


@pytest.fixture
def plain(tmp_path: Path) -> dict[str, str]:
    """An environment in which no process can import a package of the extra."""
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in EXTRA_PACKAGES)
    (tmp_path / "sitecustomize.py").write_text(f"import sys\n{blocked}", encoding="utf-8")
    return {"PYTHONPATH": f"{tmp_path}:{ROOT}"}


def test_the_extra_is_the_one_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [re.split("[>=<]", line)[0] for line in project["optional-dependencies"]["demo"]]
    assert [name.replace("-", ".") for name in named] == list(EXTRA_PACKAGES)
    assert not any(line.startswith(tuple(named)) for line in project["dependencies"])


def test_the_demo_without_the_extra_prints_the_command_that_installs_it(
    tmp_path: Path, plain: dict[str, str]
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "agent", "demo"],
        cwd=tmp_path,
        env={**os.environ, **plain},
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN_S,
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("goodput-agent: the demo needs aiohttp, ")
    assert "pip install 'goodput-agent[demo]'" in line


def test_the_agent_and_its_proxy_run_without_the_extra(
    tmp_path: Path, plain: dict[str, str]
) -> None:
    settings = {
        "engines": [{"name": "chat-0", "url": f"http://127.0.0.1:{free_port()}"}],
        "proxy": {"listen": f"127.0.0.1:{free_port()}"},
    }
    ports = AgentPorts.free()
    with AgentProcess.with_settings(tmp_path, ports, settings, plain) as agent:
        assert agent.api.requests() == []
