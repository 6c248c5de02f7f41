"""The unit of systemd, as `systemd-analyze` and the agent read it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent.app.supervising import AGENT_STOPS_WITHIN_S
from agent.settings import load
from agent.settings.values import duration_s
from agent.sources.plugin_sockets import default_places
from tests.deploy.kit import ROOT
from tests.real_parts.processes import PartMissing

FOLDER = ROOT / "deploy" / "systemd"
UNIT = FOLDER / "goodput-agent.service"
# Tenths of systemd's exposure, which is 0 to 10: a service without directives has 9.6.
EXPOSURE = 25


def directives() -> dict[str, str]:
    """The directives of the unit that have one value."""
    lines = UNIT.read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("=") for line in lines if "=" in line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def analyzed(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze")
    if program is None:
        raise PartMissing("systemd-analyze is not installed: run .ci/install-parts")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """A copy whose program is on this machine."""
    copy = tmp_path / UNIT.name
    program = directives()["ExecStart"].split()[0]
    text = UNIT.read_text(encoding="utf-8").replace(program, sys.executable)
    copy.write_text(text, encoding="utf-8")
    return copy


def test_systemd_accepts_every_directive(unit: Path) -> None:
    found = analyzed("verify", "--man=no", unit)
    assert (found.returncode, found.stdout + found.stderr) == (0, "")
    unit.write_text(unit.read_text("utf-8").replace("UMask=", "UMaks="), encoding="utf-8")
    # Where it knows a directive no more, it says so.
    assert "Unknown key" in analyzed("verify", "--man=no", unit).stderr


def test_the_service_has_few_rights(unit: Path) -> None:
    limit = f"--threshold={EXPOSURE}"
    found = analyzed("security", "--offline=yes", "--no-pager", limit, unit)
    assert found.returncode == 0, found.stdout


def test_the_command_and_the_settings_are_the_agents() -> None:
    program, *arguments = directives()["ExecStart"].split()
    assert Path(program).name == "goodput-agent"
    assert arguments == ["run", "--config", "/etc/goodput-agent/agent.yml"]
    settings = load(FOLDER / Path(arguments[-1]).name, {})
    # On this machine alone, and so without a token.
    assert settings.listen.host == "127.0.0.1"
    # In the folder where the service starts, which it may write to.
    assert not Path(settings.storage.file).is_absolute()
    assert directives()["WorkingDirectory"] == f"%S/{directives()['StateDirectory']}"


def test_the_plugin_in_the_engine_finds_the_service() -> None:
    assert Path("/run", directives()["RuntimeDirectory"]) == default_places()[0].parent


def test_wrong_settings_are_not_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "agent.yml"
    file.write_text("engine: []", encoding="utf-8")
    command = [sys.executable, "-m", "agent", "run", "--config", str(file)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert ended.returncode == int(directives()["RestartPreventExitStatus"])


def test_streams_of_the_proxy_may_end_before_the_service_is_killed() -> None:
    settings = load(FOLDER / "agent.yml", {})
    patience_s = duration_s(directives()["TimeoutStopSec"])
    assert patience_s > settings.proxy.drain + AGENT_STOPS_WITHIN_S
