"""Commands of the agent, started from a process that has imported them already.

A start imports for more than a second of processor time, and a whole run of the tests has some two
hundred starts. A start of a user, which imports first, is left to a test of the engine, and to
those of the site, of the image and of the demo. Benchmarks are of such starts too.
"""

import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Self

import pynvml  # type: ignore[import-untyped]

MODULES = ("agent", "agent.simulator", "tests.real_parts.storing_part")
_FORKING = multiprocessing.get_context("forkserver")
# With what the commands import when they run.
_IMPORTED = [
    "agent.cli",
    "agent.app.processes",
    "agent.app.serving",
    "agent.app.serving",
    "agent.app.running",
    "agent.auditing",
    "agent.compared_runs",
    "agent.demo",
    "agent.render.reference_pages",
    "agent.simulator.openai_server",
    "tests.real_parts.loaded_at_start",
]
# linux/prctl.h
_PR_SET_PDEATHSIG = 1


# Variables that are read before the first import.
_READ_AT_START = ("LD_PRELOAD", "PYTHON")


def is_preloaded(arguments: Sequence[str], environment: Iterable[str]) -> bool:
    """Whether these arguments are of such a command, and pytest runs it.

    `environment` holds the names of its own variables.
    """
    at_start = any(name.startswith(_READ_AT_START) for name in environment)
    return (
        "PYTEST_VERSION" in os.environ
        and not at_start
        and list(arguments[:2]) == [sys.executable, "-m"]
        and arguments[2] in MODULES
    )


class PreloadedProcess:
    """What `subprocess.Popen` is of a new interpreter, as far as tests use it."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    @classmethod
    def started(cls, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> Self:
        """The module of `arguments` in a process group of its own, writing to `log`."""
        _FORKING.set_forkserver_preload(_IMPORTED)
        log.touch()
        work = (arguments[2], arguments[3:], log, dict(environment))
        process = _FORKING.Process(target=_run, args=work, daemon=True)
        process.start()
        return cls(process)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code

    def terminate(self) -> None:
        self._process.terminate()


def _run(module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
    os.setpgid(0, 0)
    # The kernel ends it when the process that imported, which ends with the tests, is gone.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    _load_driver(environment.get("LD_LIBRARY_PATH", ""))
    # A reload of the agent executes these again.
    sys.orig_argv = [sys.executable, "-m", module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _load_driver(folders: str) -> None:
    """Load the driver of a test's folder, which a new interpreter would find by its name."""
    for folder in filter(None, folders.split(":")):
        library = Path(folder, "libnvidia-ml.so.1")
        if library.exists():
            pynvml.nvmlLib = ctypes.CDLL(str(library))
