"""The memory files of an engine's cgroup, version 2 and 1.

Formats: `Documentation/admin-guide/cgroup-v2.rst` and `cgroup-v1/memory.rst` of the kernel.
`memory.oom_control` counts kills since Linux 4.13.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from agent.records.engine import CgroupMemory
from agent.sources.host.procfs import HostUnreadable, Procfs, is_count

# Version 1 writes no limit as the largest multiple of a page; no machine has half of that.
_NO_LIMIT_BYTES = 2**62
_MAX_FILE_BYTES = 1024 * 1024

Figures = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CgroupPath:
    """A cgroup that has a memory controller: its version, and its path below the hierarchy."""

    version: int
    path: str


def parse_cgroup_path(text: str) -> CgroupPath | None:
    """The memory cgroup of a process from its /proc/PID/cgroup; None if it has none."""
    unified = None
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/"):
            continue
        if "memory" in controllers.split(","):
            return CgroupPath(1, path)
        if number == "0" and not controllers:
            unified = CgroupPath(2, path)
    return unified


def parse_figures(text: str) -> dict[str, int]:
    """The lines `name number` of memory.events or memory.oom_control; ignores other lines."""
    words = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and is_count(pair[1])}


def parse_bytes(text: str) -> int | None:
    """The number of bytes in a file; None for `max` and its like. Raises ValueError."""
    value = text.strip()
    if value == "max":
        return None
    if not is_count(value):
        raise ValueError(f"{value[:40]!r} is not a number of bytes")
    number = int(value)
    return None if number >= _NO_LIMIT_BYTES else number


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The names of the files that we read, in one version."""

    folder: str
    events: str
    usage: str
    limit: str


_LAYOUTS = {
    1: _Layout(
        folder="memory",
        events="memory.oom_control",
        usage="memory.usage_in_bytes",
        limit="memory.limit_in_bytes",
    ),
    2: _Layout(
        folder="",
        events="memory.events",
        usage="memory.current",
        limit="memory.max",
    ),
}


class CgroupReader:
    """Reads the memory of the cgroup that an engine's processes are in.

    It keeps the cgroup open after the engine in it ended, because the count of kills matters then.
    """

    def __init__(self, proc: Procfs, folder: Path) -> None:
        self._proc = proc
        self._folder = folder
        self._at: CgroupPath | None = None
        self._descriptor: int | None = None
        self._kills: int | None = None

    def read(self, pids: Sequence[int], unread: dict[str, str]) -> CgroupMemory:
        """The memory now. A file that cannot be read gives None, and `unread` gets the reason.

        `pids` are the engine's processes; the cgroup is that of the first. Raises HostUnreadable
        if it cannot be found.
        """
        # A killed process was in the cgroup that is open, even if another process is first now.
        if self._descriptor is None or not self._killed_again():
            self._follow(pids, unread)
        seen = self._read(unread)
        self._kills = seen.oom_kills
        return seen

    def _killed_again(self) -> bool:
        kills = self._read({}).oom_kills
        return kills is not None and self._kills is not None and kills > self._kills

    def _read(self, unread: dict[str, str]) -> CgroupMemory:
        if self._at is None or self._descriptor is None:
            raise HostUnreadable("no process of the engine is known, so its cgroup is not either")
        layout = _LAYOUTS[self._at.version]
        events = self._figures(layout.events, unread)
        if "oom_kill" not in events:
            unread.setdefault(layout.events, "the file has no oom_kill")
        return CgroupMemory(
            version=self._at.version,
            path=self._at.path,
            inode=os.fstat(self._descriptor).st_ino,
            usage_bytes=self._bytes(layout.usage, unread),
            limit_bytes=self._bytes(layout.limit, unread),
            oom_kills=events.get("oom_kill"),
        )

    def close(self) -> None:
        """Close the cgroup."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _follow(self, pids: Sequence[int], unread: dict[str, str]) -> None:
        """Open the cgroup of the first process, or keep the one that is open."""
        try:
            for pid in pids[:1]:
                self._open(pid)
        except (OSError, ValueError, HostUnreadable) as error:
            if self._descriptor is None:
                raise HostUnreadable(str(error)) from error
            unread["cgroup"] = str(error)

    def _open(self, pid: int) -> None:
        at = parse_cgroup_path(self._proc.cgroups(pid))
        if at is None:
            raise HostUnreadable(f"process {pid} is in no cgroup with a memory controller")
        if at == self._at and self._descriptor is not None and _holds(self._descriptor, pid):
            return
        opened = self._opened(at, pid)
        self.close()
        self._descriptor, self._at, self._kills = opened, at, None

    def _opened(self, at: CgroupPath, pid: int) -> int:
        for folder in self._folders(at, pid):
            try:
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                continue
            # In another cgroup namespace the same path may be an unrelated cgroup.
            if _holds(descriptor, pid):
                return descriptor
            os.close(descriptor)
        raise HostUnreadable(
            f"cgroup {at.path} of process {pid} is not below {self._folder}: mount the machine's "
            "cgroups, or run as the engine's user and share its PID namespace"
        )

    def _folders(self, at: CgroupPath, pid: int) -> Iterator[Path]:
        """Where the cgroup may be: in our own mount, then in that of the process."""
        own = _LAYOUTS[at.version].folder
        seen_from_there = self._proc.root(pid) / "sys/fs/cgroup"
        path = PurePosixPath(at.path)
        if ".." not in path.parts:
            yield self._folder / own / path.relative_to("/")
            yield seen_from_there / own / path.relative_to("/")
        yield seen_from_there / own

    def _figures(self, name: str, unread: dict[str, str]) -> Figures:
        try:
            return parse_figures(self._text(name))
        except OSError as error:
            unread[name] = str(error)
            return {}

    def _bytes(self, name: str, unread: dict[str, str]) -> int | None:
        try:
            return parse_bytes(self._text(name))
        except (OSError, ValueError) as error:
            unread[name] = str(error)
            return None

    def _text(self, name: str) -> str:
        return _text(self._descriptor, name)


def _holds(descriptor: int, pid: int) -> bool:
    """Whether a process is in the cgroup of an open folder."""
    try:
        return str(pid) in _text(descriptor, "cgroup.procs").split()
    except OSError:
        return False


def _text(descriptor: int | None, name: str) -> str:
    file = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=descriptor)
    with open(file, "rb") as opened:
        return opened.read(_MAX_FILE_BYTES).decode(errors="replace")
