"""A real engine in a process of its own, on one port."""

from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

import psutil

from tests.real_parts.processes import ServerProcess, answers

MODEL = "tiny-llama"


class EngineServer(ABC):
    """An engine that serves the tiny model; it is up when `start` returns."""

    ready_path: ClassVar[str]
    # On a busy machine a start may take minutes.
    start_within_s: ClassVar[float]

    def __init__(self, folder: Path, *, name: str, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.model = MODEL
        self.port = port
        self.log = folder / f"{name}.log"
        self._folder = folder
        self._process: ServerProcess | None = None

    @abstractmethod
    def _launched(self) -> ServerProcess:
        """The process, which is not up yet."""

    def start(self) -> None:
        """Return when it is ready; PartFailed with the log's end if it never is."""
        self._await(self._launched())

    def _await(self, process: ServerProcess) -> None:
        self._process = process
        ready = f"{self.url}{self.ready_path}"
        try:
            process.wait_until(lambda: answers(ready), within_s=self.start_within_s)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill it like a crash: requests in flight and unsent spans are lost."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    @property
    def front_pid(self) -> int:
        """The process that was started, which receives requests."""
        return self._running().pid

    def _children(self) -> list[psutil.Process]:
        """All processes that it started and that are alive."""
        children = psutil.Process(self.front_pid).children(recursive=True)
        return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]

    def _running(self) -> ServerProcess:
        assert self._process is not None, "the engine was not started"
        return self._process

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Otherwise it would wait for connections that clients keep open.
        self.kill()
