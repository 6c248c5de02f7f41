"""Parsers and readers of the files of /proc about processes.

Formats: proc(5), `Documentation/filesystems/proc.rst` of the kernel.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from agent.errors import AgentError


class HostUnreadable(AgentError):
    """A part of the machine cannot be read; the message has the reason."""


_LISTENING = "0A"
_SOCKET = re.compile(r"socket:\[(\d+)\]")
# Dead but not reaped, or about to be removed: nothing runs there.
_GONE = frozenset("ZXx")
_MAX_LINE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of /proc/PID/stat. Times are in the kernel's clock ticks."""

    pid: int
    comm: str
    state: str
    parent: int
    cpu_ticks: int
    started_ticks: int

    @property
    def gone(self) -> bool:
        """Whether only an entry in the process table is left."""
        return self.state in _GONE


def parse_stat(text: str) -> Stat:
    """One line of /proc/PID/stat. Raises ValueError for anything else."""
    # The name is in parentheses and may contain any character, parentheses too.
    start, end = text.index("("), text.rindex(")")
    fields = text[end + 1 :].split()
    if len(fields) < 20:
        raise ValueError(f"a stat line with {len(fields)} fields after the name")
    return Stat(
        pid=int(text[:start]),
        comm=text[start + 1 : end],
        state=fields[0],
        parent=int(fields[1]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        started_ticks=int(fields[19]),
    )


def parse_listening(text: str) -> dict[int, int]:
    """The inode of every listening socket with its port, from /proc/net/tcp or tcp6."""
    rows = (line.split() for line in text.splitlines()[1:])
    return {
        int(row[9]): port
        for row in rows
        if len(row) > 9 and row[3] == _LISTENING and is_count(row[9])
        if (port := _port(row[1])) is not None
    }


def parse_listening_addresses(text: str, port: int) -> frozenset[str]:
    """The addresses that sockets listen on at a port, from /proc/net/tcp or tcp6."""
    rows = (line.split() for line in text.splitlines()[1:])
    sockets = (row[1] for row in rows if len(row) > 9 and row[3] == _LISTENING)
    found = (_address(socket) for socket in sockets if _port(socket) == port)
    return frozenset(address for address in found if address is not None)


def _address(socket: str) -> str | None:
    """The address in a row: words of 32 bits, each in the byte order of the machine."""
    try:
        digits = bytes.fromhex(socket.rpartition(":")[0])
        words = (digits[at : at + 4] for at in range(0, len(digits), 4))
        ordered = b"".join(w[::-1] if sys.byteorder == "little" else w for w in words)
        return str(ip_address(ordered))
    except ValueError:
        return None


def is_count(text: str) -> bool:
    """Whether a text is a 64-bit counter as the kernel writes it."""
    return text.isascii() and text.isdecimal() and len(text) <= 20


def _port(address: str) -> int | None:
    try:
        return int(address.rpartition(":")[2], 16)
    except ValueError:
        return None


def parse_oom_kills(vmstat: str) -> int | None:
    """Processes killed since boot because memory ran out; None if the file lacks the count."""
    for line in vmstat.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and is_count(value.strip()):
            return int(value)
    return None


class Procfs:
    """Reads a /proc folder. A process that ends while it is read is left out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def stat(self, pid: int) -> Stat | None:
        """The state of a process; None if it is gone or cannot be read."""
        try:
            stat = parse_stat(self._text(f"{pid}/stat"))
        except (OSError, ValueError):
            return None
        return None if stat.gone else stat

    def schedstat(self, pid: int) -> tuple[float, float] | None:
        """Seconds that a process' main thread ran, and waited for a processor; None if not counted.

        Format: `Documentation/scheduler/sched-stats.rst` of the kernel.
        """
        try:
            fields = self._text(f"{pid}/schedstat").split()
        except OSError:
            return None
        if len(fields) != 3 or not all(is_count(field) for field in fields):
            return None
        return int(fields[0]) / 1e9, int(fields[1]) / 1e9

    def stats(self) -> dict[int, Stat]:
        """Every process that can be read. Raises OSError if there is no /proc."""
        pids = (int(name) for name in os.listdir(self._folder) if name.isdecimal())
        found = (self.stat(pid) for pid in pids)
        return {stat.pid: stat for stat in found if stat is not None}

    def children(self, pid: int) -> list[int]:
        """The PIDs of a process's children, as far as they can be read."""
        found: list[int] = []
        for file in (self._folder / f"{pid}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, file.read_text().split())
        return found

    def title(self, pid: int) -> str:
        """The first word of a command line, which setproctitle replaces; empty if unreadable.

        The other words may be secrets.
        """
        try:
            with (self._folder / f"{pid}/cmdline").open("rb") as file:
                line = file.read(4096)
        except OSError:
            return ""
        return line.partition(b"\0")[0].decode(errors="replace").strip()

    def words(self, pid: int) -> list[str]:
        """A whole command line; empty if unreadable. It may contain secrets: never store it."""
        try:
            with (self._folder / f"{pid}/cmdline").open("rb") as file:
                line = file.read(_MAX_LINE_BYTES)
        except OSError:
            return []
        return line.decode(errors="replace").split("\0")

    def listening(self) -> dict[int, int]:
        """The inode of every listening TCP socket with its port. Raises OSError."""
        found: dict[int, int] = {}
        for name in ("net/tcp", "net/tcp6"):
            with suppress(FileNotFoundError):  # a kernel without that protocol
                found |= parse_listening(self._text(name))
        return found

    def listening_addresses(self, port: int) -> frozenset[str]:
        """The addresses that any program listens on at a TCP port. Raises OSError."""
        found: frozenset[str] = frozenset()
        for name in ("net/tcp", "net/tcp6"):
            with suppress(FileNotFoundError):  # a kernel without that protocol
                found |= parse_listening_addresses(self._text(name), port)
        return found

    def sockets(self, pid: int) -> Iterator[int]:
        """The inodes of a process's sockets; none if they may not be read."""
        folder = self._folder / f"{pid}/fd"
        try:
            names = os.listdir(folder)
        except OSError:
            return
        for name in names:
            try:
                target = os.readlink(folder / name)
            except OSError:
                continue
            if found := _SOCKET.fullmatch(target):
                yield int(found.group(1))

    def cgroups(self, pid: int) -> str:
        """The text of /proc/PID/cgroup. Raises OSError."""
        return self._text(f"{pid}/cgroup")

    def root(self, pid: int) -> Path:
        """The root of the file system that a process sees."""
        return self._folder / f"{pid}/root"

    def oom_kills(self) -> int | None:
        """Kills on the whole machine since boot because memory ran out. Raises OSError."""
        return parse_oom_kills(self._text("vmstat"))

    def _text(self, name: str) -> str:
        return (self._folder / name).read_text(errors="replace")
