"""Receives what `goodput-agent-vllm`, a plugin of vLLM, sends of steps and requests.

One thread listens on the sockets that the plugins write to, and refuses datagrams of other
programs.
"""

import logging
import os
import selectors
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agent.catalog.reasons import PluginDropped
from agent.errors import SettingsInvalid
from agent.records.engine import EndedRequest, EngineStep, ServedRequest
from agent.sources.plugin_records import MAX_COUNT, PluginRecords, read_datagram

_LOG = logging.getLogger(__name__)

# A plugin sends datagrams of 32 KB at most.
_DATAGRAM_BYTES = 65_536
# After this many datagrams of one engine, the next engine is read.
_DATAGRAMS_PER_TURN = 16
# Beyond this the receiver pauses, and the plugins keep or drop their records.
MAX_RECORDS_PER_S = 20_000
# For the agent's user and group: in a pod, the group is `fsGroup`.
_MODE = 0o660
# How soon a socket is made again whose file was deleted.
_CHECK_EVERY_S = 1.0


class StepConsumer(Protocol):
    """Gets each record of a plugin, in the receiver's thread. It must not wait."""

    def on_step(self, step: EngineStep) -> None:
        """Handle a step."""

    def on_ended(self, ended: EndedRequest) -> None:
        """Handle a request that ended."""

    def on_served(self, served: ServedRequest) -> None:
        """Handle a request whose HTTP request ended."""


class PluginCounts(Protocol):
    """Counts received and dropped records."""

    def plugin_received(self, engine: str, steps: int, requests: int) -> None:
        """Count records that were received."""

    def plugin_dropped(self, engine: str, reason: PluginDropped, count: int) -> None:
        """Count records that were dropped."""

    def plugin_counted(self, engine: str, name: str, status_class: int, count: int) -> None:
        """Add to what a front counts: see PluginCount."""


@dataclass(frozen=True, slots=True)
class _Listener:
    """A bound socket, and the device and inode of the file that the bind made."""

    opened: socket.socket
    file: tuple[int, int] | None


class _Stream:
    """The state of the datagrams of one engine.

    `heard_at` is the Unix time of the last datagram, `step_at` of the last one with a step. `runs`
    has, for each run of a front, its next sequence number and how many records it dropped so far.
    An engine may have several fronts; of all runs, ended ones included, the newest are kept.
    """

    def __init__(self) -> None:
        self.heard_at: float | None = None
        self.step_at: float | None = None
        self.runs: dict[int, tuple[int, int]] = {}


_MAX_RUNS = 256


class PluginReceiver:
    """Reads the datagrams of all engines with a socket and hands records to the consumers.

    The queue of each socket is the kernel's; the plugins keep what does not fit, and drop the
    oldest.
    """

    def __init__(
        self,
        paths: Mapping[str, Path],
        consumers: Sequence[StepConsumer],
        counts: PluginCounts,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`paths` has the path of each engine's socket."""
        self._paths = dict(paths)
        self._consumers = tuple(consumers)
        self._counts = counts
        self._now = now
        self._streams = {engine: _Stream() for engine in paths}
        self._listeners: dict[str, _Listener] = {}
        self._problems: dict[str, str] = {}
        self._next_check = 0.0
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-plugins", daemon=True)
        self._read_in_second = (0, 0)

    def heard_at(self, engine: str) -> float | None:
        """The Unix time of the last datagram of the engine's plugin; None before the first."""
        return self._streams[engine].heard_at

    def step_at(self, engine: str) -> float | None:
        """The Unix time when the last step of the engine arrived; None before the first."""
        return self._streams[engine].step_at

    def problem(self, engine: str) -> str | None:
        """Why no plugin can reach the engine's socket; None while it is in place."""
        return self._problems.get(engine)

    def start(self) -> None:
        """Make the sockets and start the thread. Raises SettingsInvalid if a socket fails."""
        for engine, path in self._paths.items():
            self._listen(engine, path)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; the plugins keep their last records for the next agent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join()
        for engine, listener in self._listeners.items():
            # The open socket keeps the inode, so the file of another program has another one.
            if _file_at(self._paths[engine]) == listener.file:
                self._paths[engine].unlink(missing_ok=True)
            listener.opened.close()
        self._selector.close()
        os.close(self._wake)

    def _listen(self, engine: str, path: Path) -> None:
        listener = _open_listener(engine, path)
        self._listeners[engine] = listener
        self._selector.register(listener.opened, selectors.EVENT_READ, engine)

    def _check_files(self) -> None:
        """Make each socket again whose file is gone."""
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + _CHECK_EVERY_S
        for engine, path in self._paths.items():
            if _file_at(path) == self._listeners[engine].file:
                self._problems.pop(engine, None)
            else:
                self._listen_again(engine, path)

    def _listen_again(self, engine: str, path: Path) -> None:
        before = self._listeners[engine].opened
        while self._read(engine):
            pass
        try:
            self._listen(engine, path)
        except SettingsInvalid as error:
            problem = "; ".join(error.problems)
            if self._problems.get(engine) != problem:
                _LOG.error("the plugin of engine %s cannot be heard: %s", engine, problem)
            self._problems[engine] = problem
            return
        self._problems.pop(engine, None)
        self._selector.unregister(before)
        before.close()
        _LOG.warning("the socket %s of engine %s was deleted, and made again", path, engine)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._check_files()
            events = self._selector.select(_CHECK_EVERY_S)
            ready = [key.data for key, _ in events if key.data is not None]
            for engine in ready:
                for _ in range(_DATAGRAMS_PER_TURN):
                    if not self._read(engine):
                        break
            self._limit_rate()

    def _limit_rate(self) -> None:
        """Wait for the next second after MAX_RECORDS_PER_S records in this one."""
        second, read = self._read_in_second
        monotonic = time.monotonic()
        if read > MAX_RECORDS_PER_S and second == int(monotonic):
            self._stopping.wait(second + 1 - monotonic)

    def _read(self, engine: str) -> bool:
        """Read one datagram of an engine; returns False without one."""
        try:
            datagram, _, flags, _ = self._listeners[engine].opened.recvmsg(
                _DATAGRAM_BYTES, 0, socket.MSG_DONTWAIT
            )
        except OSError:
            return False
        try:
            self._take(engine, b"" if flags & socket.MSG_TRUNC else datagram)
        except Exception:
            # The thread must go on for the next datagram.
            _LOG.exception("a datagram of the plugin of engine %s could not be read", engine)
            self._counts.plugin_dropped(engine, PluginDropped.MALFORMED, 1)
        return True

    def _take(self, engine: str, datagram: bytes) -> None:
        now = self._now()
        content = read_datagram(datagram, engine, now)
        self._count_second(1 + (0 if content is None else content.records))
        if content is None:
            self._counts.plugin_dropped(engine, PluginDropped.NOT_OURS, 1)
            return
        stream = self._streams[engine]
        stream.heard_at = now
        if content.steps:
            stream.step_at = now
        self._count(engine, stream, content)
        for consumer in self._consumers:
            _hand_over(consumer, content)

    def _count_second(self, records: int) -> None:
        second = int(time.monotonic())
        counted_in, read = self._read_in_second
        self._read_in_second = (second, records + (read if counted_in == second else 0))

    def _count(self, engine: str, stream: _Stream, content: PluginRecords) -> None:
        requests = len(content.ended) + len(content.served)
        self._counts.plugin_received(engine, len(content.steps), requests)
        for counted in content.counts:
            name, status_class, count = counted.name, counted.status_class, counted.count
            self._counts.plugin_counted(engine, name, status_class, count)
        for reason, count in content.refused.items():
            self._counts.plugin_dropped(engine, reason, count)
        expected, dropped = stream.runs.pop(content.run, (content.first, content.dropped))
        stream.runs[content.run] = (content.first + content.records, content.dropped)
        if len(stream.runs) > _MAX_RUNS:
            stream.runs.pop(next(iter(stream.runs)))
        by_sender = max(0, content.dropped - dropped)
        missing = max(0, content.first - expected - by_sender)
        if 0 < by_sender < MAX_COUNT:
            self._counts.plugin_dropped(engine, PluginDropped.AGENT_BEHIND, by_sender)
        # A plugin's gap is smaller: a larger number is forged.
        if 0 < missing < MAX_COUNT:
            self._counts.plugin_dropped(engine, PluginDropped.LOST, missing)


def _hand_over(consumer: StepConsumer, content: PluginRecords) -> None:
    """Call a consumer with all records; its failure is logged and does not reach the others."""
    try:
        for step in content.steps:
            consumer.on_step(step)
        for ended in content.ended:
            consumer.on_ended(ended)
        for served in content.served:
            consumer.on_served(served)
    except Exception:
        _LOG.exception("records of an engine's plugin were not taken")


def _open_listener(engine: str, path: Path) -> _Listener:
    """A new socket at this path, also in place of one without a reader. Raises SettingsInvalid."""
    setting = f"plugin_socket of engine {engine}"
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        path.parent.mkdir(exist_ok=True)
        if taken := _taken(path):
            raise SettingsInvalid([f"{setting}: {path} is {taken}; choose another path"])
        path.unlink(missing_ok=True)
        # The bind makes the file with this mode less the umask.
        os.fchmod(opened.fileno(), _MODE)
        opened.bind(str(path))
        os.chmod(path, _MODE)
    except OSError as error:
        opened.close()
        reason = error.strerror or error
        raise SettingsInvalid(
            [f"{setting}: cannot listen at {path}: {reason}; choose another path"]
        ) from error
    except SettingsInvalid:
        opened.close()
        raise
    return _Listener(opened, _file_at(path))


def try_socket(engine: str, path: Path, *, is_own: bool) -> None:
    """Raises SettingsInvalid if no socket can be made here; `is_own` says whether one that is
    there may be replaced."""
    if not is_own:
        _open_listener(engine, path).opened.close()
        path.unlink()
        return
    setting = f"plugin_socket of engine {engine}"
    if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
        raise SettingsInvalid([f"{setting}: {path} is a file and no socket; choose another path"])
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise SettingsInvalid([f"{setting}: no socket can be made in {path.parent}"])


def _file_at(path: Path) -> tuple[int, int] | None:
    """Device and inode of what is at a path; None if nothing can be seen."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _taken(path: Path) -> str | None:
    """What is at a path that may not be replaced; None of a socket that its program left."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return "a file and no socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            probe.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except OSError:
        # Such as EPROTOTYPE of a stream socket: a program listens.
        return "the socket of another program"
    return "the socket of another program"
