"""Keeps the open requests of this process in a file that outlives it.

The file is beside the agent's socket, mapped into memory, and locked while its process lives: the
kernel frees the lock of a killed process. So the agent sees live requests and stalled streams, and
after the end of the process which requests ended with it. The agent's reader has the same layout
(`agent/sources/open_requests.py`); numbers have the machine's byte order, as both are on it.
"""

import atexit
import contextlib
import fcntl
import logging
import mmap
import os
import struct
import time

_LOG = logging.getLogger("vllm.goodput_agent")

MAGIC = b"GPAO"
FORMAT = 2

# Magic, format, 0, slots, bytes of a record, pid, Unix time of the start.
HEADER = struct.Struct("@4sHHIIQd")
HEADER_BYTES = 64

# Behind the header are the slots, and behind these one record for each.
SLOTS = 1024
SLOT_BYTES = 64
RECORD_BYTES = 2048
_RECORDS_AT = HEADER_BYTES + SLOTS * SLOT_BYTES
FILE_BYTES = _RECORDS_AT + SLOTS * RECORD_BYTES

# A slot begins with a byte, its state. The other fields follow at these bytes.
FREE, OPEN = 0, 1
# Bytes of the record, arrival as Unix time and on CLOCK_MONOTONIC, the last event there or 0.
_REQUEST_AT, _write_request = 8, struct.Struct("@Qddd").pack_into
_LAST_AT = 32

# The agent only reads. Whoever could truncate the file would kill this process by SIGBUS.
_MODE = 0o640
# How often a file is made that cannot be made, and a deleted one again.
_RETRY_S = 10.0

# By path of the agent's socket: when its file may be tried again.
_retry_at_s: "dict[str, float]" = {}
# Paths of the agent's socket whose file cannot be made, and that were logged.
_warned: "set[str]" = set()
_in_use: "set[OpenRequests]" = set()


class Slot:
    """One open request; for the thread of its OpenRequests.

    `file.last_s[place]` is the time of the last event: whoever has many writes it there.
    """

    __slots__ = ("_index", "file", "place")

    def __init__(self, file: "OpenRequests | _NoFile", index: int, place: int) -> None:
        self.file = file
        self.place = place
        self._index = index

    def event(self, at_s: float) -> None:
        """Note an event of the response's stream at a time of CLOCK_MONOTONIC."""
        self.file.last_s[self.place] = at_s

    def close(self) -> None:
        """The request ended; further calls do nothing."""
        if self.place:
            self.file.free(self._index)
            self.file, self.place = _NO_FILE, 0


class _NoFile:
    """In place of a file: it keeps nothing."""

    def __init__(self) -> None:
        self.content = bytearray(8)
        self.last_s = memoryview(self.content).cast("d")

    def free(self, index: int) -> None:
        """Do nothing."""


_NO_FILE = _NoFile()
# In place of a slot, where there is none.
NO_SLOT = Slot(_NO_FILE, 0, 0)


class OpenRequests:
    """The file of one process. For one thread; nothing here raises because of the file.

    `too_many` and `too_long` count the requests that got no slot.
    """

    def __init__(self, path: str, lock: int, content: mmap.mmap) -> None:
        """`lock` is a locked descriptor of the file, `content` its mapping."""
        self.path = path
        self._map(content)
        self.too_many = 0
        self.too_long = 0
        self._lock = lock
        self._inode = os.fstat(lock).st_ino
        self._free = list(range(SLOTS - 1, -1, -1))
        self._check_at_s = 0.0
        _in_use.add(self)

    @classmethod
    def beside(cls, socket_path: str) -> "OpenRequests | None":
        """Make the file beside the agent's socket; None if it cannot be made.

        Then it may be called again at any time, and tries again each 10 s.
        """
        now_s = time.monotonic()
        if now_s < _retry_at_s.get(socket_path, now_s):
            return None
        path = f"{socket_path}.{os.urandom(8).hex()}.open"
        try:
            lock, content = _made(path)
            HEADER.pack_into(
                content, 0, MAGIC, FORMAT, 0, SLOTS, RECORD_BYTES, os.getpid(), time.time()
            )
            return cls(path, lock, content)
        except Exception as error:
            _retry_at_s[socket_path] = now_s + _RETRY_S
            # Without a folder there is no agent yet, which makes it.
            if socket_path not in _warned and not isinstance(error, FileNotFoundError):
                _warned.add(socket_path)
                _LOG.warning("open requests are not kept: %s", error)
            return None

    def open(self, record: bytes, arrived_at: float, arrived_s: float) -> "Slot | None":
        """Keep a request that arrived at a Unix time and a time of CLOCK_MONOTONIC.

        None if all slots are in use or the record is too long, and after the end.
        """
        if self not in _in_use:
            return None
        if arrived_s >= self._check_at_s:
            self._check_file(arrived_s)
        length = len(record)
        if length > RECORD_BYTES:
            self.too_long += 1
            return None
        if not self._free:
            self.too_many += 1
            return None
        index = self._free.pop()
        content, at = self.content, HEADER_BYTES + index * SLOT_BYTES
        record_at = _RECORDS_AT + index * RECORD_BYTES
        content[record_at : record_at + length] = record
        _write_request(content, at + _REQUEST_AT, length, arrived_at, arrived_s, 0.0)
        # Last: a process may be killed between any two of these lines.
        content[at] = OPEN
        return Slot(self, index, (at + _LAST_AT) // 8)

    def _map(self, content: mmap.mmap) -> None:
        self.content = content
        self.last_s = memoryview(content).cast("d")

    def free(self, index: int) -> None:
        """Free a slot; for `Slot` alone."""
        self.content[HEADER_BYTES + index * SLOT_BYTES] = FREE
        if self in _in_use:
            self._free.append(index)

    def close(self) -> None:
        """Delete the file at a clean end of the process, unless requests are still open.

        Those end with the process, and the agent finds them in the file.
        """
        if self not in _in_use:
            return
        if len(self._free) == SLOTS:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        self.leave()

    def leave(self) -> None:
        """Take no more requests, and leave the file to the process that made it."""
        _in_use.discard(self)
        self._free.clear()
        # The mapping stays: slots may still be written.
        os.close(self._lock)

    def _check_file(self, now_s: float) -> None:
        """Make the file again if it was deleted, as systemd does with the folder of an agent."""
        self._check_at_s = now_s + _RETRY_S
        try:
            if os.stat(self.path).st_ino == self._inode:
                return
        except OSError:
            pass
        try:
            lock, content = _made(self.path)
        except Exception as error:
            _LOG.debug("open requests are not kept in %s: %s", self.path, error)
            return
        content[:] = self.content[:]
        os.close(self._lock)
        self._lock = lock
        self._map(content)
        self._inode = os.fstat(lock).st_ino


def _made(path: str) -> "tuple[int, mmap.mmap]":
    """A new locked file without a header, as its locked descriptor and its mapping."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(path, flags | os.O_CREAT | os.O_EXCL, _MODE)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(lock, _MODE)
        # A sparse file on a full file system would kill this process by SIGBUS.
        os.posix_fallocate(lock, 0, FILE_BYTES)
        # A mapping keeps what it was made of, also in a child: so it is made of another descriptor
        # than the locked one.
        mapped = os.open(path, flags)
        try:
            return lock, mmap.mmap(mapped, FILE_BYTES)
        finally:
            os.close(mapped)
    except BaseException:
        os.unlink(path)
        os.close(lock)
        raise


def _close_all() -> None:
    for each in tuple(_in_use):
        each.close()


def _leave_to_parent() -> None:
    # A child that kept the lock would make a dead parent look alive.
    for each in tuple(_in_use):
        each.leave()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_leave_to_parent)
