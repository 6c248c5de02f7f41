"""Reads the files in which `goodput-agent-vllm` keeps the open requests of an engine's fronts.

`plugins/vllm/goodput_agent_vllm/open_requests.py` describes the files. They are beside the
plugin's socket, one for each process of a front, and outlive it. A front may write anything into
its file, so every value is checked.
"""

import fcntl
import logging
import math
import os
import re
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from agent.catalog.metrics import UNKNOWN
from agent.catalog.reasons import PluginDropped
from agent.sources.plugin_sockets import PluginSocket

_LOG = logging.getLogger(__name__)

_MAGIC = b"GPAO"
_FORMAT = 2
_HEADER = struct.Struct("@4sHHIIQd")
_HEADER_BYTES = 64
_SLOT = struct.Struct("@B7xQddd")
_SLOT_BYTES = 64
_OPEN = 1

_MAX_SLOTS = 16_384
_MAX_RECORD_BYTES = 65_536
_MAX_FILE_BYTES = 64 << 20

# What is read of a folder, and of one engine's files, at each check.
_MAX_NAMES = 10_000
_MAX_FILES = 256
_NAME = re.compile(r"\.[0-9a-f]{16}\.open")

# No pause of a stream is this long unless it stands still.
STALLED_AFTER_S = 10.0


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request that had begun and not ended.

    `arrived_at` is Unix time; `arrived_s` and `last_s` are of CLOCK_MONOTONIC: when the request
    arrived, and the last event of its response, None before one. `record` is what the front wrote
    of the request; of a live front, it may be of the next one in its place.
    """

    arrived_at: float
    arrived_s: float
    last_s: float | None
    record: bytes

    @property
    def heard_at(self) -> float:
        """The Unix time of its last event, or of its arrival."""
        return self.arrived_at + (self.last_s or self.arrived_s) - self.arrived_s


@dataclass(frozen=True, slots=True)
class OpenRequestsFile:
    """The open requests of one process; `malformed` slots could not be read."""

    pid: int
    started_at: float
    owner_lives: bool
    requests: Sequence[OpenRequest]
    malformed: int


class FileRefused(Exception):
    """A file that no plugin of this format wrote, or that may not be read."""

    def __init__(self, reason: PluginDropped, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def read_open_requests(path: Path) -> OpenRequestsFile:
    """Read one file; it never waits. Raises FileRefused, and FileNotFoundError without a file."""
    with _opened(path) as descriptor:
        header = os.pread(descriptor, _HEADER_BYTES, 0)
        slots, record_bytes, pid, started_at = _read_header(header, os.fstat(descriptor).st_size)
        # Before the slots: what the owner wrote before its death is then complete.
        owner_lives = _is_locked(descriptor)
        if not owner_lives and not os.fstat(descriptor).st_nlink:
            # Its owner, which lives, made another one after this was deleted.
            raise FileNotFoundError(f"{path} was deleted")
        table = os.pread(descriptor, slots * _SLOT_BYTES, _HEADER_BYTES)
        records_at = _HEADER_BYTES + slots * _SLOT_BYTES
        requests: list[OpenRequest] = []
        malformed = 0
        for index in _open_slots(table):
            at = records_at + index * record_bytes
            request = _request(table, index, record_bytes, descriptor, at)
            if request is None:
                malformed += 1
            else:
                requests.append(request)
    return OpenRequestsFile(pid, started_at, owner_lives, requests, malformed)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor of a regular file; opening anything else could wait, or have an effect."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise FileRefused(PluginDropped.NOT_OURS, f"{path} is not a regular file")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        text = f"{path} cannot be read: {error.strerror}"
        raise FileRefused(PluginDropped.UNREADABLE, text) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileRefused(PluginDropped.NOT_OURS, f"{path} is not a regular file")
        yield descriptor
    except (FileRefused, FileNotFoundError):
        raise
    except OSError as error:
        text = f"{path} cannot be read: {error.strerror}"
        raise FileRefused(PluginDropped.UNREADABLE, text) from error
    finally:
        os.close(descriptor)


def _read_header(header: bytes, file_bytes: int) -> tuple[int, int, int, float]:
    """Slots, bytes of a record, pid and Unix time of the start.

    Raises FileRefused, and FileNotFoundError before the owner has written it.
    """
    if not any(header):
        raise FileNotFoundError("the file is being made")
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise FileRefused(PluginDropped.NOT_OURS, "the file is not of the plugin")
    _, version, _, slots, record_bytes, pid, started_at = _HEADER.unpack_from(header)
    if version != _FORMAT:
        text = f"the file has format {version}; this agent reads {_FORMAT}"
        raise FileRefused(PluginDropped.OTHER_FORMAT, text)
    expected = _HEADER_BYTES + slots * (_SLOT_BYTES + record_bytes)
    sizes_hold = 0 < slots <= _MAX_SLOTS and 0 < record_bytes <= _MAX_RECORD_BYTES
    if not sizes_hold or expected > _MAX_FILE_BYTES or file_bytes != expected:
        text = f"the file has {file_bytes} bytes; {slots} slots of {record_bytes} need {expected}"
        raise FileRefused(PluginDropped.MALFORMED, text)
    return slots, record_bytes, pid, started_at if math.isfinite(started_at) else 0.0


def _is_locked(descriptor: int) -> bool:
    """Whether the process that made the file lives: it holds a lock until its end."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _open_slots(table: bytes) -> Iterator[int]:
    states, index = table[::_SLOT_BYTES], -1
    while (index := states.find(_OPEN, index + 1)) >= 0:
        yield index


def _request(
    table: bytes, index: int, record_bytes: int, descriptor: int, record_at: int
) -> OpenRequest | None:
    """The request in a slot; None of one that cannot be true."""
    _, length, arrived_at, arrived_s, last_s = _SLOT.unpack_from(table, index * _SLOT_BYTES)
    if length > record_bytes or not math.isfinite(arrived_at + arrived_s):
        return None
    # False also for NaN.
    if last_s and not arrived_s <= last_s < math.inf:
        return None
    record = os.pread(descriptor, length, record_at)
    if len(record) != length:
        return None
    return OpenRequest(arrived_at, arrived_s, last_s or None, record)


@dataclass(frozen=True, slots=True)
class LiveRequests:
    """The open requests of an engine's live fronts.

    A stalled one has begun its response, and has had no event since; `longest_stall_s` is None
    without one.
    """

    open: int
    stalled: int
    longest_stall_s: float | None


class EndedFrontConsumer(Protocol):
    """Gets the requests of fronts that ended, in the thread of the check."""

    def on_front_ended(self, engine: str, requests: Sequence[OpenRequest]) -> None:
        """Handle the requests that were open when a process of the engine's front ended.

        The file is deleted after this returns. If it raises, the requests come again at the next
        check. They also do after a restart of the agent in between.
        """


class DroppedCounts(Protocol):
    """Counts files and slots that were refused."""

    def plugin_dropped(self, engine: str, reason: PluginDropped, count: int) -> None:
        """Count records of an engine's plugin that were dropped."""


class OpenRequestsWatch:
    """Checks the files beside the sockets of plugins. For one thread, but for `live`."""

    def __init__(
        self,
        sockets: Sequence[PluginSocket],
        consumers: Sequence[EndedFrontConsumer],
        counts: DroppedCounts,
        *,
        stalled_after_s: float = STALLED_AFTER_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`monotonic` reads CLOCK_MONOTONIC."""
        self._sockets = tuple(sockets)
        self._consumers = tuple(consumers)
        self._counts = counts
        self._stalled_after_s = stalled_after_s
        self._monotonic = monotonic
        self._live: Mapping[str, LiveRequests] = {}
        # The engines of files whose front lived at a check.
        self._engines: dict[Path, str] = {}
        # Files that were refused, and those that were handed over and cannot be deleted.
        self._refused: set[Path] = set()
        self._left: set[Path] = set()

    def live(self, engine: str) -> LiveRequests | None:
        """The engine's open requests at the last check; None while no live front has a file."""
        return self._live.get(engine)

    def check(self) -> Mapping[str, LiveRequests]:
        """Read all files, and hand over the requests of ended fronts.

        Returns what `live` returns, by engine.
        """
        fronts: dict[str, list[OpenRequestsFile]] = {}
        seen: set[Path] = set()
        for each in self._sockets:
            for path in _files_beside(each.path):
                seen.add(path)
                self._check(each, path, fronts)
        self._refused &= seen
        self._left &= seen
        self._engines = {path: self._engines[path] for path in self._engines.keys() & seen}
        live = {engine: self._counted(files) for engine, files in fronts.items()}
        self._live = live
        return live

    def _check(
        self, plugins: PluginSocket, path: Path, fronts: dict[str, list[OpenRequestsFile]]
    ) -> None:
        """Read a file. Add it to the `fronts` of its engine, or hand it over if its owner ended."""
        try:
            file = read_open_requests(path)
        except FileNotFoundError:
            return
        except FileRefused as error:
            if path not in self._refused:
                self._refused.add(path)
                engine = plugins.engine or UNKNOWN
                self._counts.plugin_dropped(engine, error.reason, 1)
                _LOG.warning("open requests of engine %s in %s: %s", engine, path, error)
            return
        if not file.owner_lives:
            if path not in self._left:
                self._hand_over(self._engines.get(path) or plugins.engine, path, file)
        elif found := plugins.engine_of(file.pid):
            self._engines[path] = found
            fronts.setdefault(found, []).append(file)

    def _hand_over(self, engine: str | None, path: Path, file: OpenRequestsFile) -> None:
        """Hand the requests of an ended front over, and only then delete its file."""
        count = len(file.requests)
        if engine is None:
            self._counts.plugin_dropped(UNKNOWN, PluginDropped.UNKNOWN_ENGINE, count)
        elif not self._taken(engine, file):
            return
        if file.malformed:
            self._counts.plugin_dropped(engine or UNKNOWN, PluginDropped.MALFORMED, file.malformed)
        _LOG.warning(
            "a front of engine %s (process %d) ended with %d open requests",
            engine or "unknown",
            file.pid,
            count,
        )
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._left.add(path)
            _LOG.warning("%s cannot be deleted: %s", path, error.strerror)

    def _taken(self, engine: str, file: OpenRequestsFile) -> bool:
        try:
            for consumer in self._consumers:
                consumer.on_front_ended(engine, file.requests)
        except Exception:
            _LOG.exception("requests of an ended front of engine %s are handed over later", engine)
            return False
        return True

    def _counted(self, fronts: Sequence[OpenRequestsFile]) -> LiveRequests:
        now_s = self._monotonic()
        requests = [request for front in fronts for request in front.requests]
        idle_s = [now_s - each.last_s for each in requests if each.last_s is not None]
        stalls_s = [each for each in idle_s if each >= self._stalled_after_s]
        return LiveRequests(len(requests), len(stalls_s), max(stalls_s, default=None))


def _files_beside(socket_path: Path | None) -> Sequence[Path]:
    """The paths beside a socket that are named like files of open requests."""
    if socket_path is None:
        return ()
    try:
        with os.scandir(socket_path.parent) as entries:
            names = [entry.name for entry in islice(entries, _MAX_NAMES)]
    except OSError:
        return ()
    own = socket_path.name
    ours = (name for name in names if name.startswith(own) and _NAME.fullmatch(name, len(own)))
    return [socket_path.with_name(name) for name in islice(ours, _MAX_FILES)]
