import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.sources.host.machine import PaperMachine

_SCRIPT = Path(__file__).with_name("standin_engine.py")


class StandIn:
    """A real front with a real core, of this test alone."""

    def __init__(self, folder: Path, *flags: str) -> None:
        core = folder / "VLLM::EngineCore"
        core.symlink_to(Path(sys.executable).resolve())
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SCRIPT), str(core), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        port, core_pid = self._says().split()
        self.url = f"http://127.0.0.1:{port}"
        self.front_pid = self.process.pid
        self.core_pid = int(core_pid)

    def eat(self) -> str:
        """Let the core take memory until it is gone; what its front says of it."""
        assert self.process.stdin is not None
        self.process.stdin.write("eat\n")
        self.process.stdin.flush()
        return self._says()

    def end(self) -> None:
        for pid in (self.core_pid, self.front_pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def _says(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the engine's stand-in ended"
        return line.strip()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[StandIn]:
    running = StandIn(tmp_path)
    yield running
    running.end()


@pytest.fixture
def machine(tmp_path: Path) -> PaperMachine:
    return PaperMachine(tmp_path)
