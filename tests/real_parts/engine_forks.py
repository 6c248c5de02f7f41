"""A plugin of vLLM for tests: an engine's processes are forked from its front.

On CPU, vLLM starts its core and its worker as new interpreters, each of which imports for seven
seconds of processor time what the front has imported already. vLLM loads this plugin after its
imports and before its second thread, so that a fork is safe. Each fork waits until multiprocessing
starts a new interpreter, and does what that would do: it has the same parent, title, files,
environment and program. It runs in the engine's Python, so it imports nothing of ours.

Until then nothing is searched for garbage, which is a sixth of the time of the imports: see
sitecustomize.py beside its copy.
"""

import atexit
import fcntl
import gc
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from multiprocessing import util
from typing import Any

# What the front does not import.
_IMPORTED_LATER = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
)
# The front starts one core, and that one worker; it starts several API servers, too.
_GENERATIONS = 2
_FRONTS = {"vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main"}
_API_SERVERS = "--api-server-count"
# The variable that leaves the processes of an engine as busy as they are without this plugin.
BUSY_LOOPS = "GOODPUT_TEST_BUSY_LOOPS"
# A step takes several milliseconds. vLLM itself looks without a pause until a second after the last
# message, which takes a processor from whatever runs beside it.
_PAUSE_S = 0.0001
_MOST_FILES = 64
# Above all numbers of files in use.
_HIGH = 1000

_start_anew = util.spawnv_passfds
_waiting: list[tuple[int, socket.socket]] = []


def fork_ahead() -> None:
    """The plugin: forks what waits, the core for one, in a front that has no second thread."""
    is_front = not _FRONTS.isdisjoint(sys.orig_argv)
    is_first = is_front and _start_anew is util.spawnv_passfds and not _has_threads()
    if is_first:
        for module in _IMPORTED_LATER:
            import_module(module)
    gc.enable()
    if is_first:
        if BUSY_LOOPS not in os.environ:
            _pause_in_busy_loops()
        gc.freeze()
        util.spawnv_passfds = _start
        for _ in range(1 + _api_servers()):
            _fork(_GENERATIONS)


def _pause_in_busy_loops() -> None:
    """Core and worker look for messages often enough, not all the time."""
    shared_memory = vars(import_module("vllm.distributed.device_communicators.shm_broadcast"))
    shared_memory["sched_yield"] = partial(time.sleep, _PAUSE_S)


def _api_servers() -> int:
    """The API servers beside the front."""
    given = sys.orig_argv
    return int(given[given.index(_API_SERVERS) + 1]) if _API_SERVERS in given else 0


def _has_threads() -> bool:
    return len(os.listdir("/proc/self/task")) > 1


def _start(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """In place of multiprocessing's start of a new interpreter: the process id."""
    if "--multiprocessing-fork" not in args or not _waiting:
        return _start_anew(path, args, passfds)
    pid, child = _waiting.pop()
    with child:
        socket.send_fds(child, [b"."], list(passfds))
        work = (list(passfds), os.getcwd(), dict(os.environ), list(args))
        child.sendall(pickle.dumps(work))
    return pid


def _fork(generations: int) -> None:
    if generations == 0:
        return
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        _waiting.append((pid, ours))
        return
    code = 1
    try:
        _forget(theirs)
        _fork(generations - 1)
        code = _run(theirs)
    finally:
        os._exit(code)


def _forget(parent: socket.socket) -> None:
    """Drop what a new interpreter would not have."""
    # An agent must not take it for a second front.
    title = "python -c from multiprocessing.spawn import spawn_main"
    import_module("setproctitle").setproctitle(title)
    _waiting.clear()
    atexit._clear()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Not closed, as their owners would close other files of these numbers.
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in map(int, os.listdir("/proc/self/fd")):
        if file > 2 and file not in (parent.fileno(), nothing) and _is_open(file):
            os.dup2(nothing, file, inheritable=False)


def _is_open(file: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{file}")


def _run(parent: socket.socket) -> int:
    """Do what a new interpreter was asked to do; the exit code."""
    sent, files, _, _ = socket.recv_fds(parent, 1, _MOST_FILES)
    if not sent:
        return 0  # the front ended before it started a core
    with parent, parent.makefile("rb") as work:
        numbers, folder, environment, arguments = pickle.load(work)
    _renumber(files, numbers)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    # By the variable that several API servers get for a page of all their metrics.
    values = vars(import_module("prometheus_client.values"))
    values["ValueClass"] = values["get_value_class"]()
    program = arguments.index("-c") + 1
    sys.argv[:] = ["-c", *arguments[program + 1 :]]
    try:
        exec(arguments[program], {"__name__": "__main__"})
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _renumber(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give these files the numbers that they have in the parent."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _HIGH) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number, inheritable=False)
        os.close(file)
