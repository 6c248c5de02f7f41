"""A server process of a test: it has its own process group and log, and leaves no child."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Self

import requests

from tests.real_parts.preloaded import PreloadedProcess, is_preloaded

POLL_S = 0.1
LOG_TAIL_LINES = 40


class PartMissing(Exception):
    """A real part is not installed; the message says which script of .ci installs it."""


class PartFailed(Exception):
    """A real part ended or did not respond in time; the message ends with its log."""


class ServerProcess:
    """One running command; its children end with it, also when the tests are killed."""

    def __init__(
        self,
        arguments: Sequence[str | Path],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
        anew: bool = False,
    ) -> None:
        """`anew` starts an interpreter also where one could be forked that has imported it."""
        self.log = log
        command = [*map(str, arguments)]
        everywhere = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | PreloadedProcess
        if user is None and not anew and is_preloaded(command, environment or ()):
            self._process = PreloadedProcess.started(command, log, everywhere)
        else:
            self._process = _started(_as_user(user), command, log, everywhere)

    @property
    def pid(self) -> int:
        """The process id of the command itself."""
        return self._process.pid

    def wait_until(self, ready: Callable[[], bool], *, within_s: float) -> None:
        """Return once `ready` holds; PartFailed at once when the process ends before that."""
        deadline = time.monotonic() + within_s
        while not ready():
            if self._ended_within(POLL_S):
                raise PartFailed(f"ended with {self._process.returncode}\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise PartFailed(f"not ready after {within_s} s\n{self.log_tail()}")

    def wait(self, *, within_s: float) -> int:
        """The exit status of a command that ends by itself."""
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise PartFailed(f"still running after {within_s} s\n{self.log_tail()}") from None

    def stop(self, *, within_s: float = 30) -> int:
        """Send SIGTERM to the command, then kill the rest of its group; returns the exit status."""
        self._process.terminate()
        self._ended_within(within_s)
        return self.kill()

    def kill(self) -> int:
        """Kill the whole group, as kill -9 does; returns the exit status."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def log_tail(self) -> str:
        """The last lines that the process wrote."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def _ended_within(self, wait_s: float) -> bool:
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _started(
    user: Sequence[str], command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            # The kernel tells the server to end when the tests die without a chance to clean up.
            ["setpriv", "--pdeathsig", "TERM", *user, "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            # No session of its own: to Linux's scheduler that is a group of processes, between
            # which niceness says nothing.
            process_group=0,
        )


def run_as(user: str | None, arguments: Sequence[str | Path], *, folder: Path) -> None:
    """Run a command to its end in a folder, as a user if one is named.

    `subprocess` would fork to change the user, and a fork while gRPC has threads may crash.
    """
    subprocess.run(
        ["setpriv", *_as_user(user), "--", *map(str, arguments)],
        check=True,
        capture_output=True,
        cwd=folder,
    )


def _as_user(user: str | None) -> list[str]:
    return [] if user is None else ["--reuid", user, "--regid", user, "--clear-groups"]


def answers(url: str) -> bool:
    """Whether a GET of this address returns 200."""
    try:
        return requests.get(url, timeout=5).status_code == HTTPStatus.OK
    except requests.RequestException:
        return False
