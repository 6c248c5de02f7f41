"""The first hour's page shows what its commands print."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.ports import free_port
from tests.real_parts.waiting import eventually
from tests.simulated import Simulator

PAGE = Path(__file__).parents[1] / "docs" / "first-hour.md"
WIDTH, WITHIN_S = 118, 120.0
CHAT = {"model": "simulated-chat-8b", "time_scale": 1.0, "arrival_rate": 8.0}


def shown(command: str) -> list[str]:
    """The lines that the page shows below a command, without those that it leaves out."""
    block = PAGE.read_text().split(f"$ .venv/bin/goodput-agent {command}\n")[1].split("```")[0]
    return [line for line in map(plain, block.splitlines()) if line != "..."]


def plain(line: str) -> str:
    """A line without its figures and the spaces at its end."""
    return re.sub(r"[0-9][0-9.,]*", "#", line).rstrip()


@pytest.mark.slow
def test_the_audit_of_the_first_hour_is_what_it_prints_of_the_simulator(tmp_path: Path) -> None:
    ports = AgentPorts.free()
    # Without spans, as an engine is found.
    with Simulator(tmp_path, grpc=free_port(), scenario=CHAT) as engine:
        settings = {"engines": [{"name": "engine-0", "url": engine.url}]}
        with AgentProcess.with_settings(tmp_path, ports, settings):
            command = [
                *(sys.executable, "-m", "agent", "audit", engine.url),
                *("--agent", f"http://127.0.0.1:{ports.listen}"),
            ]

            def printed() -> list[str]:
                done = subprocess.run(
                    command,
                    env={**os.environ, "COLUMNS": str(WIDTH)},
                    capture_output=True,
                    text=True,
                    check=True,
                )
                return [plain(line) for line in done.stdout.splitlines()]

            def prints_them() -> bool:
                others = set(shown("audit http://127.0.0.1:8000")) - set(printed())
                assert not others
                return True

            eventually(prints_them, within_s=WITHIN_S, what="the lines of the page")
