"""The command that starts the simulator."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

pytestmark = pytest.mark.slow

ANNOUNCED = re.compile(
    r"^simulator listening on (http://127\.0\.0\.1:\d+) \(simulated vLLM, not a real engine\)\n$"
)


@contextmanager
def _started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "agent.simulator", *arguments]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    ) as simulator:
        try:
            yield simulator
        finally:
            simulator.kill()


def _announced_url(simulator: subprocess.Popen[str]) -> str:
    assert simulator.stdout is not None
    found = ANNOUNCED.match(simulator.stdout.readline())
    assert found is not None
    return found[1]


def test_it_announces_its_port_serves_a_scenario_and_ends_cleanly_on_sigterm(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.yaml").write_text("model: own-simulated-model\n", encoding="utf-8")
    with _started("--port", "0", "--scenario", str(tmp_path / "own.yaml")) as simulator:
        models = requests.get(f"{_announced_url(simulator)}/v1/models", timeout=60).json()
        simulator.send_signal(signal.SIGTERM)
        assert simulator.wait(60) == 0
        assert simulator.stderr is not None
        assert simulator.stderr.read() == ""
    assert models["data"][0]["id"] == "own-simulated-model"


def test_it_ends_when_its_stdin_is_closed_if_asked() -> None:
    with _started("--port", "0", "--no-traffic", "--until-stdin-closes") as simulator:
        _announced_url(simulator)
        assert simulator.stdin is not None
        simulator.stdin.close()
        assert simulator.wait(60) == 0


def test_an_invalid_scenario_ends_it_with_the_problem(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("model: llama", encoding="utf-8")
    with _started("--scenario", str(tmp_path / "bad.yaml")) as simulator:
        _, stderr = simulator.communicate(timeout=60)
    assert simulator.returncode == 2
    assert "must contain 'simulated'" in stderr
    assert "Traceback" not in stderr
