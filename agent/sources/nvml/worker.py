"""A thread for calls that may never return."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class Worker:
    """Does one task after the other. A task that hangs holds up neither its owner nor the exit."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        # An executor's threads are joined at exit, and a driver that hangs would hold the process.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """The task's result or error, once it is done."""
        future: Future[Result] = Future()
        self._tasks.put((future, task))
        return future

    def close(self) -> None:
        """End after the tasks that were submitted."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            future, task = item
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
