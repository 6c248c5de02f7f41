"""Runs the processes of an agent with a proxy, restarts those that end, and stops in time."""

import asyncio
import gc
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn, Self

from agent.errors import AgentError

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


# The exit status of a process that cannot work with its settings.
SETTINGS_INVALID = 2
# A process is started again at once, but later each time while it ends soon after its start.
_RESTART_AFTER_S = 0.2
_MAX_RESTART_AFTER_S = 5.0
_SETTLED_S = 10.0
_PARENT_CHECK_S = 1.0
_LONGEST_WAIT_S = 3600.0
_PROCESS_NAME = Path("/proc/self/comm")
_STOPS = (signal.SIGTERM, signal.SIGINT)
# Stops an agent that stores the records of workers. SIGTERM may come to all processes at once, as
# from systemd, and the agent must end after the workers.
STOPS_LAST = signal.SIGUSR1
# Those of a supervisor. They stay blocked while it becomes another program, which then gets them.
SIGNALS = {*_STOPS, signal.SIGHUP, signal.SIGCHLD}


@dataclass(frozen=True, slots=True, eq=False)
class ProcessPart:
    """One process: its work, which returns an exit status, and how long it may take to stop.

    Of the name, Linux shows 15 characters. The supervisor sends `stop_signal`; if that is not
    SIGTERM, the process ignores SIGTERM.
    """

    name: str
    work: Callable[[], int]
    stops_within_s: float
    stop_signal: signal.Signals = signal.SIGTERM


class Running(NamedTuple):
    """A part, and its process; None if that ended with another status than 0."""

    part: ProcessPart
    pid: int | None


class _Process:
    """The running process of a part, or the time of its next start.

    The part of one that an earlier supervisor left is done when a process ends with status 0.
    """

    def __init__(self, part: ProcessPart, pid: int | None = None, *, left: bool = False) -> None:
        self.part = part
        self.pid = pid
        self.start_at = 0.0
        self.starts = 0
        self.failed = left and pid is None
        self._left = left
        self._started_at = 0.0
        self._delay_s = 0.0

    def start(self) -> None:
        self.starts += 1
        self._started_at = time.monotonic()
        try:
            self.pid = os.fork()
        except OSError:
            _LOG.exception("%s cannot be started now", self.part.name)
            self.ended(1)
        if self.pid == 0:
            _work(self.part)

    def ended(self, status: int) -> None:
        """Plan the next start."""
        self.failed = status != 0
        now = time.monotonic()
        if now - self._started_at > _SETTLED_S:
            self._delay_s = 0.0
        done = self._left and not self.failed
        self.pid, self.start_at = None, math.inf if done else now + self._delay_s
        self._delay_s = min(max(_RESTART_AFTER_S, 2 * self._delay_s), _MAX_RESTART_AFTER_S)

    def signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            os.kill(self.pid, number)


def _work(part: ProcessPart) -> NoReturn:
    with suppress(OSError):
        # `ps` and `top` show it. Only Linux has the file.
        _PROCESS_NAME.write_text(part.name)
    # Ctrl-C and the end of a terminal reach all its processes; the supervisor alone decides.
    for number in {signal.SIGINT, signal.SIGHUP, signal.SIGTERM} - {part.stop_signal}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    status = 1
    try:
        status = part.work()
    except Exception:
        _LOG.exception("%s failed", part.name)
    finally:
        logging.shutdown()
        # Nothing of the supervisor's own end may run here.
        os._exit(status)


# A new interpreter with this variable tries to start and ends. It has a JSON list of the addresses
# and sockets of the agent that runs, which cannot be free.
TRY = "_GOODPUT_AGENT_TRY"
# Before a failure, as the command prints it.
ERROR_PREFIX = "goodput-agent: "
TRY_WITHIN_S = 60.0


class Plan(NamedTuple):
    """What a new agent says of itself: the address of its proxy, if it has one, and its workers."""

    proxy: str | None
    workers: int


class Trial:
    """A new agent that only tries to start, in a process of its own."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Begin. Raises OSError."""
        self._ends_at = time.monotonic() + TRY_WITHIN_S
        # In memory: a pipe could fill up, and a disk may be full.
        out, err = (os.memfd_create(name) for name in ("plan", "problem"))
        self._out, self._err = os.fdopen(out, "rb"), os.fdopen(err, "rb")
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=dict(environment)
        )

    @classmethod
    def of_this_program(cls, addresses: Collection[str]) -> Self:
        """Try what is started with the arguments of this program, while it has these addresses.

        Raises OSError.
        """
        traceback = {"_TYPER_STANDARD_TRACEBACK": "1", "TERM": "dumb"}
        command = [sys.executable, *sys.orig_argv[1:]]
        return cls(command, os.environ | traceback | {TRY: json.dumps(sorted(addresses))})

    @property
    def left_s(self) -> float:
        """The time that it still has."""
        return self._ends_at - time.monotonic()

    def has_ended(self) -> bool:
        """Whether it has ended, or has no more time."""
        return self._process.poll() is not None or self.left_s <= 0

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    def plan(self) -> Plan | None:
        """What it found; None if it failed, and the log says why."""
        overdue = self._process.poll() is None
        if overdue:
            self.kill()
        self._out.seek(0)
        self._err.seek(0)
        try:
            plan = json.loads(self._out.read().splitlines()[-1])
            return Plan(plan["proxy"], plan["workers"])
        except (ValueError, LookupError, TypeError):
            late = f"it did not start within {TRY_WITHIN_S:g} s"
            why = late if overdue else self._problem(self._err.read().decode(errors="replace"))
        _LOG.error("the new agent cannot start, so nothing changes: %s", why)
        return None

    def _problem(self, said: str) -> str:
        _, prefix, problem = said.rpartition(ERROR_PREFIX)
        if prefix:
            return "; ".join(problem.split("\n")).strip("; ")
        # The last line of a traceback, or of a box around a mistake in the arguments.
        lines = [line.strip("│ ") for line in said.splitlines() if any(map(str.isalnum, line))]
        if not lines:
            return f"it ended with {self._process.returncode}"
        frames = [line for line in lines if line.startswith('File "')]
        return f"{lines[-1]} ({frames[-1]})" if frames else lines[-1]


def start_again() -> NoReturn:
    """Replace this program by a new one with its arguments. Raises OSError."""
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class Supervisor:
    """Starts all parts, and stops them group by group.

    It must run before any thread, because its parts are forked from it.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[ProcessPart]],
        begin_trial: Callable[[], Trial],
        reload: Callable[["Supervisor", Plan], None],
        left: Sequence[Running] | None = None,
    ) -> None:
        """On SIGHUP a trial begins, and `reload` is called when it succeeds; everything goes on if
        it fails, or `reload` returns. `left` are processes of the first group that an earlier
        supervisor left; None if this is the first one. The work of their parts begins when they
        end with another status than 0."""
        self._groups = [[_Process(part) for part in parts] for parts in groups]
        self._groups[0] += [_Process(part, pid, left=True) for part, pid in left or ()]
        self._processes = [process for group in self._groups for process in group]
        self._begin_trial = begin_trial
        self._trial: Trial | None = None
        self._reload = reload
        self._first = left is None
        self._asked_to_stop = False

    @property
    def asked_to_stop(self) -> bool:
        """Whether SIGTERM or SIGINT came."""
        return self._asked_to_stop

    @property
    def first_group(self) -> list[Running]:
        """The processes of the first group that run, or failed and are not started again yet."""
        return [Running(p.part, p.pid) for p in self._groups[0] if p.pid is not None or p.failed]

    def run(self) -> int:
        """Supervise until SIGTERM or SIGINT; the exit status. A part whose settings are invalid
        when everything starts ends the others, too. Later it is tried again, as after a failure."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            return self._supervise()
        finally:
            self.stop()

    def _supervise(self) -> int:
        self._start_due()
        while not self._asked_to_stop:
            number = self._next_signal()
            if number in _STOPS:
                self._asked_to_stop = True
            elif number == signal.SIGHUP:
                self._try()
            else:
                self._reload_if_tried()
                if self._reap():
                    return SETTINGS_INVALID
                self._start_due()
        return 0

    def _try(self) -> None:
        """Try a new agent, in place of one that is tried already: files may have changed since."""
        if self._trial is not None:
            self._trial.kill()
        try:
            self._trial = self._begin_trial()
        except (AgentError, OSError) as error:
            self._trial = None
            _LOG.error("no new agent can be tried, so nothing changes: %s", error)

    def _reload_if_tried(self) -> None:
        if self._trial is None or not self._trial.has_ended():
            return
        plan, self._trial = self._trial.plan(), None
        if plan is not None:
            self._reload(self, plan)

    def _next_signal(self) -> int | None:
        due = [process.start_at for process in self._processes if process.pid is None]
        trial_s = _LONGEST_WAIT_S if self._trial is None else self._trial.left_s
        wait_s = max(0.0, min(min(due, default=math.inf) - time.monotonic(), trial_s))
        received = signal.sigtimedwait(SIGNALS, wait_s)
        return None if received is None else received.si_signo

    def _start_due(self) -> None:
        # A reload may have taken the signal to stop.
        if self._asked_to_stop:
            return
        for process in self._processes:
            if process.pid is None and process.start_at <= time.monotonic():
                process.start()

    def _reap(self) -> bool:
        """Note the processes that ended; returns whether one cannot work with its settings, and
        never could."""
        invalid = False
        while (ended := _ended()) is not None:
            pid, status = ended
            for process in self._processes:
                if process.pid == pid:
                    process.ended(status)
                    level = logging.WARNING if status else logging.INFO
                    _LOG.log(level, "%s: ended with status %d", process.part.name, status)
                    never_worked = self._first and process.starts == 1
                    invalid |= status == SETTINGS_INVALID and never_worked
        return invalid

    def stop(self) -> None:
        """Stop all parts."""
        _LOG.info("stopping")
        if self._trial is not None:
            self._trial.kill()
        for group in self._groups:
            self._stop_group(group)

    def stop_last(self) -> None:
        """Stop the last group alone."""
        self._stop_group(self._groups[-1])

    def _stop_group(self, group: Sequence[_Process]) -> None:
        for process in group:
            process.signal(process.part.stop_signal)
        deadline = time.monotonic() + max(each.part.stops_within_s for each in group)
        while any(process.pid for process in group) and time.monotonic() < deadline:
            again = signal.sigtimedwait(SIGNALS, 0.2)
            if again is not None and again.si_signo in _STOPS:
                if self._asked_to_stop:
                    break
                self._asked_to_stop = True
            self._reap()
        for process in group:
            process.signal(signal.SIGKILL)


def _ended() -> tuple[int, int] | None:
    """The next process that ended, and its exit status, negative for a signal."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


async def supervisor_gone() -> None:
    """Return when the process that started this one has ended."""
    parent = os.getppid()
    while os.getppid() == parent:
        await asyncio.sleep(_PARENT_CHECK_S)


_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@contextmanager
def kept_imports() -> Iterator[None]:
    """Search for no garbage while modules are imported, and never among what they made.

    That search was a fifth of a start. What is left out of it stays in the memory that the workers
    of the proxy share.
    """
    gc.disable()
    # A thread that a module starts, as OpenBLAS does, leaves signals to the main thread for good.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        gc.freeze()
        gc.enable()
