"""Follows the log of an engine: a file that may be rotated and truncated, or a pipe."""

import errno
import os
import re
import select
import stat
import threading
from pathlib import Path
from typing import Protocol

from agent.catalog.failure_lines import meaning_of
from agent.records.engine import LogFinding, LogSample
from agent.settings.named_files import in_time
from agent.sources.host.procfs import HostUnreadable

# Read of one line. The texts that matter are at its beginning.
MAX_LINE_BYTES = 16 * 1024
# Stored of a line as evidence.
MAX_EVIDENCE_CHARACTERS = 500
# A dying engine can repeat its lines.
MAX_FINDINGS = 200

# vLLM's line with --enable-eplb and log_balancedness (distributed/eplb/eplb_state.py, 0.32).
_EXPERT_LOAD = re.compile(r"\bEPLB step: .*\bavg_tokens=(\d{1,15}\.\d+), max_tokens=(\d{1,15})\b")
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ufffd]+")


class LineScanner:
    """Cuts bytes into lines and collects findings for the next sample."""

    def __init__(self) -> None:
        self._started = bytearray()
        self._lines = 0
        self._findings: list[LogFinding] = []
        self._mean_load = self._highest_load = 0.0

    def feed(self, piece: bytes) -> None:
        """The next bytes of the log."""
        *ended, rest = piece.split(b"\n")
        for part in ended:
            self._add(part)
            self.end_line()
        self._add(rest)

    def end_line(self) -> None:
        """End the current line: nothing more will be added to it."""
        if not self._started:
            return
        self._lines += 1
        self._read(bytes(self._started))
        self._started.clear()

    def drop_line(self) -> None:
        """Drop the current line: the bytes that follow it are not fed."""
        self._started.clear()

    def drain(self) -> LogSample:
        """Everything since the last call."""
        highest = self._highest_load
        sample = LogSample(
            lines=self._lines,
            findings=tuple(self._findings),
            expert_balance=self._mean_load / highest if highest else None,
        )
        self._lines = 0
        self._findings = []
        self._mean_load = self._highest_load = 0.0
        return sample

    def _add(self, part: bytes) -> None:
        # A writer leaves zeros before its next line when its file is truncated.
        part = part if self._started else part.lstrip(b"\0")
        self._started += part[: MAX_LINE_BYTES - len(self._started)]

    def _read(self, line: bytes) -> None:
        text = _COLOURS.sub("", line.decode(errors="replace"))
        if load := _EXPERT_LOAD.search(text):
            # Summed, so that steps with more tokens count more.
            self._mean_load += float(load[1])
            self._highest_load += float(load[2])
            return
        found = meaning_of(text)
        if found is None or len(self._findings) >= MAX_FINDINGS:
            return
        meaning, exit_code = found
        shown = _UNPRINTABLE.sub(" ", text).strip()[:MAX_EVIDENCE_CHARACTERS]
        self._findings.append(LogFinding(meaning=meaning, line=shown, exit_code=exit_code))


# Read of a file at one poll. Of a log that grew by more, the end is read.
MAX_BYTES_AT_ONCE = 16 * 1024 * 1024
_PIECE_BYTES = 256 * 1024
_PIPE_WAIT_MS = 250
# Bytes kept of the begin and of the end of what was read. The first lines of a start hold the time
# and so differ; the last lines of engines that fail in the same way do not.
_MARK_BYTES = 256


class _Log(Protocol):
    def read(self) -> LogSample: ...

    def close(self) -> None: ...


class LogFollower:
    """Reads what is written from now on to a path, a file or a named pipe.

    A log that exists at the first read is read from its end, a later one from its start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._log: _Log | None = None
        self._waited = False

    def read(self) -> LogSample:
        """What was written since the last read. Raises HostUnreadable or OSError.

        It waits only for a file system that hangs, and for that only a few seconds; what was
        read meanwhile is lost.
        """
        return in_time(self._path, self._read)

    def _read(self) -> LogSample:
        if self._log is None:
            waited, self._waited = self._waited, True
            self._log = self._opened(at_end=not waited)
        return self._log.read()

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def _opened(self, *, at_end: bool) -> _Log:
        mode = os.stat(self._path).st_mode
        if stat.S_ISFIFO(mode):
            return PipeLog(self._path)
        if stat.S_ISREG(mode):
            return FileLog(self._path, at_end=at_end)
        raise HostUnreadable(
            f"{self._path} cannot be followed: configure a log file or a named pipe"
        )


class FileLog:
    """A log file, known by its inode, and the files that replace it, each from its start.

    A file was truncated if it is shorter than what was read, or differs at either end of that.
    Then it is read from its start, even if only its head was cut.
    """

    def __init__(self, path: Path, *, at_end: bool) -> None:
        """Open the file at the path. Raises OSError."""
        self._path = path
        self._scanner = LineScanner()
        self._descriptor = _open(path)
        try:
            self._position = os.fstat(self._descriptor).st_size if at_end else 0
            self._marks = self._both_ends()
        except OSError:
            self.close()
            raise

    def read(self) -> LogSample:
        """What was written since the last read. Raises OSError."""
        self._read_on()
        if self._replaced():
            successor = _open(self._path)
            try:
                # The lines between the last read and its end.
                self._read_on()
            except OSError:
                os.close(successor)
                raise
            self.close()
            self._descriptor, self._position = successor, 0
            self._marks = self._both_ends()
            self._scanner.end_line()
            self._read_on()
        return self._scanner.drain()

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _replaced(self) -> bool:
        """Whether the path is another file now. A missing or empty file replaces nothing."""
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return False
        return there.st_size > 0 and not os.path.samestat(there, os.fstat(self._descriptor))

    def _both_ends(self) -> tuple[bytes, bytes]:
        """The first and the last bytes of what was read, as they are in the file now."""
        marked = min(self._position, _MARK_BYTES)
        starts = (0, self._position - marked)
        head, end = (os.pread(self._descriptor, marked, start) for start in starts)
        return head, end

    def _cut(self) -> bool:
        """Whether the file was truncated, even if it has grown since.

        A writer that continues at its old position leaves zeros before it.
        """
        return any(
            there != mark and there.strip(b"\0") != b""
            for there, mark in zip(self._both_ends(), self._marks, strict=True)
        )

    def _read_on(self) -> None:
        size = os.fstat(self._descriptor).st_size
        if size < self._position or self._cut():
            self._scanner.drop_line()
            self._position = 0
        if (too_much := size - self._position - MAX_BYTES_AT_ONCE) > 0:
            self._scanner.drop_line()
            self._position += too_much
        # Up to the size at the start: a log may grow as fast as it is read.
        while self._position < size:
            piece = os.pread(
                self._descriptor, min(_PIECE_BYTES, size - self._position), self._position
            )
            if not piece:
                break
            self._scanner.feed(piece)
            self._position += len(piece)
        self._marks = self._both_ends()


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


class PipeLog:
    """A named pipe. A thread of its own empties it, because a writer to a full pipe waits."""

    def __init__(self, path: Path) -> None:
        # Open for writing too: the pipe stays open from one writer to the next.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._scanner = LineScanner()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._failed: OSError | None = None
        self._thread = threading.Thread(target=self._drain, name=f"log {path}", daemon=True)
        self._thread.start()

    def read(self) -> LogSample:
        """What was written since the last read. Raises OSError once the pipe cannot be read."""
        with self._lock:
            if self._failed is not None:
                raise self._failed
            return self._scanner.drain()

    def close(self) -> None:
        """Stop reading. Later writes fail with a broken pipe."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join()
            os.close(self._descriptor)

    def _drain(self) -> None:
        waiting = select.poll()
        waiting.register(self._descriptor, select.POLLIN)
        while not self._closing.is_set():
            if not waiting.poll(_PIPE_WAIT_MS):
                continue
            try:
                piece = os.read(self._descriptor, _PIECE_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                self._failed = OSError(error.errno or errno.EIO, error.strerror)
                return
            with self._lock:
                self._scanner.feed(piece)
