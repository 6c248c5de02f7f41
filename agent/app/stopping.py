"""Ends the process in time, whatever hangs: threads that wait for a database cannot be stopped."""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable

_LOG = logging.getLogger(__name__)

# From SIGTERM to the end of all processes, beside the drain of the proxy.
STOP_WITHIN_S = 10.0
# Of it, a worker of the proxy has this long to hand over its last records, and the agent the rest.
WORKER_FLUSHES_WITHIN_S = 2.5
AGENT_STOPS_WITHIN_S = 6.5
# For the interpreter, which waits for its threads.
EXIT_WITHIN_S = 1.0


def _exit() -> None:
    os._exit(0)


def end_process_within(limit_s: float, end: Callable[[], None] = _exit) -> None:
    """End the process after `limit_s`, if it has not ended by itself.

    It ends as by a kill: a transaction that is cut off is rolled back. The exit status is 0: what
    was not done is done after the next start.
    """
    timer = threading.Timer(limit_s, _end, [end])
    timer.daemon = True
    timer.start()


def _end(end: Callable[[], None]) -> None:
    waiting = sorted(
        thread.name
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not thread.daemon
    )
    _LOG.warning("the agent ends while these still work: %s", ", ".join(waiting) or "none")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    end()


async def within(limit_s: float, what: str, *works: Awaitable[object]) -> None:
    """Wait until the works have ended, or until `limit_s`. Logs what failed or is left."""
    if not works:
        return
    tasks = [asyncio.ensure_future(work) for work in works]
    done, late = await asyncio.wait(tasks, timeout=max(limit_s, 0.0))
    for task in done:
        if error := task.exception():
            _LOG.error("%s failed", what, exc_info=error)
    if late:
        _LOG.warning("%s did not end within %.1f s and is left", what, limit_s)
