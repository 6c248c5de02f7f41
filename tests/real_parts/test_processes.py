import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.real_parts.processes import PartFailed, ServerProcess
from tests.real_parts.waiting import eventually

SERVER_WITH_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def test_a_process_that_ends_early_fails_with_its_log(tmp_path: Path) -> None:
    process = ServerProcess(python("raise SystemExit('no such model')"), tmp_path / "log")
    with pytest.raises(PartFailed, match="no such model"):
        process.wait_until(lambda: False, within_s=60)


def test_a_process_that_never_responds_fails_at_the_deadline(tmp_path: Path) -> None:
    with (
        ServerProcess(python("import time; time.sleep(600)"), tmp_path / "log") as process,
        pytest.raises(PartFailed, match="not ready"),
    ):
        process.wait_until(lambda: False, within_s=0.1)


def test_stopping_leaves_no_child_behind(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ServerProcess(python(SERVER_WITH_CHILD), log):
        child = int(eventually(log.read_text, within_s=60, what="the child's process id"))
        assert psutil.pid_exists(child)
    eventually(lambda: not alive(child), within_s=60, what="the end of the child")


def test_a_server_ends_when_the_tests_are_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tests = subprocess.Popen(
        python(
            "import pathlib, time\n"
            "from tests.real_parts.processes import ServerProcess\n"
            "code = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'\n"
            f"ServerProcess([{sys.executable!r}, '-c', code], pathlib.Path({str(log)!r}))\n"
            "time.sleep(600)\n"
        ),
        cwd=Path(__file__).parents[2],
    )
    eventually(log.exists, within_s=60, what="the server's log")
    server = int(eventually(log.read_text, within_s=60, what="the server's process id"))
    tests.kill()
    tests.wait()
    eventually(lambda: not alive(server), within_s=60, what="the end of the server")


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
