"""Reads files that a person names, with a limit of bytes and of time."""

import json
import os
import stat
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar
from weakref import WeakMethod

from agent.settings.values import did_you_mean

# A file system that answers at all answers sooner.
READ_WITHIN_S = 5.0

# The larger ones of these files have thousands of lines.
SETTINGS_BYTES = 1024 * 1024

FOLLOW_EVERY_S = 1.0

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

Result = TypeVar("Result")

# Threads that wait for a file system, by the path that they read.
_waiting: dict[Path, Thread] = {}


def read_named_file(
    path: Path, *, max_bytes: int = SETTINGS_BYTES, within_s: float = READ_WITHIN_S
) -> bytes:
    """The content of a regular file.

    Raises OSError with the reason alone if it cannot be read, is larger, or is a pipe, device or
    directory; of these, TimeoutError if its file system does not respond in time.
    """
    return in_time(path, partial(read_at_once, path, max_bytes), within_s)


def similar_files(path: Path, error: OSError) -> str:
    """The end of a sentence about a file that is missing: what its folder has in its place."""
    if not isinstance(error.__cause__, FileNotFoundError):
        return ""
    folder = path.parent
    try:
        names = in_time(folder, partial(os.listdir, folder))
    except FileNotFoundError:
        return f"; the folder {folder.absolute()} is missing, too"
    except OSError:
        names = []
    return did_you_mean(path.name, names) or f"; looked for in {folder.absolute()}"


def in_time(path: Path, read: Callable[[], Result], within_s: float = READ_WITHIN_S) -> Result:
    """What `read` returns or raises; it runs in a thread of its own.

    Raises TimeoutError, an OSError, if it hangs.

    A path whose earlier read still hangs fails at once, so that threads do not pile up.
    """
    earlier = _waiting.get(path)
    if earlier is not None and earlier.is_alive():
        raise TimeoutError(f"no response from its file system since over {within_s:g} s")
    result: Future[Result] = Future()
    thread = Thread(target=_run, args=(read, result), name=f"read {path}", daemon=True)
    thread.start()
    if not wait([result], within_s).done:
        _waiting[path] = thread
        raise TimeoutError(f"no response from its file system within {within_s:g} s")
    # No thread may be left where a supervisor forks.
    thread.join()
    _waiting.pop(path, None)
    return result.result()


def _run(read: Callable[[], Result], result: "Future[Result]") -> None:
    try:
        result.set_result(read())
    except BaseException as error:
        result.set_exception(error)


def read_json(content: bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also for one that is nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def follow(refresh: Callable[[], None], name: str) -> None:
    """Call a method every second, in a thread that ends when the method's object is gone."""
    Thread(target=_follow, args=(WeakMethod(refresh),), name=f"follow {name}", daemon=True).start()


def _follow(refresh: "WeakMethod[Callable[[], None]]") -> None:
    while (call := refresh()) is not None:
        call()
        del call
        time.sleep(FOLLOW_EVERY_S)


def read_at_once(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file, as `read_named_file`, in this thread: it may hang."""
    try:
        # Without waiting: a named pipe may have no writer.
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        raise OSError(error.strerror) from error
    except ValueError as error:
        raise OSError("no file can have such a name") from error
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG:
            raise OSError(f"Is {_KINDS.get(kind, 'no file')}; name a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(content) > max_bytes:
        raise OSError(f"it has more than {max_bytes:,} bytes")
    return content
