"""Reads the machine of one engine: its processes, its cgroup and its log."""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from agent.records.engine import (
    CgroupMemory,
    EngineProcess,
    HostSample,
    ProcessRole,
)
from agent.sources.host.cgroups import CgroupReader
from agent.sources.host.log import LogFollower
from agent.sources.host.processes import ProcessFinder, ProcessLocator, limits_given
from agent.sources.host.procfs import HostUnreadable, Procfs

_DEFAULT_PORTS = {"http": 80, "https": 443}
# If the processes are in several cgroups, that of the one with the most memory is read.
_CGROUP_OF = (ProcessRole.CORE, ProcessRole.WORKER, ProcessRole.FRONT, ProcessRole.OTHER)

Part = TypeVar("Part")


class HostSource:
    """Reads the processes, the cgroup and the log of one engine. Not for use by two threads."""

    def __init__(
        self,
        *,
        url: str,
        pids: Sequence[int] = (),
        log: Path | None = None,
        same_machine: bool | None = None,
        proc: Path = Path("/proc"),
        cgroups: Path = Path("/sys/fs/cgroup"),
    ) -> None:
        """`same_machine` overrides what the URL shows; None takes it from the URL."""
        self._proc = Procfs(proc)
        self._finder = ProcessFinder(
            self._proc,
            process_locator(url, pids, same_machine),
            ticks_per_s=os.sysconf("SC_CLK_TCK"),
        )
        self._cgroup = CgroupReader(self._proc, cgroups)
        self._log = None if log is None else LogFollower(log)

    def read(self, now: float) -> HostSample:
        """One sample; `now` is Unix time. Never raises: a part that cannot be read is None."""
        unread: dict[str, str] = {}
        # In this order: a kill is counted before the process is gone, and logged last.
        processes = _part("processes", unread, lambda: self._finder.read(now))
        return HostSample(
            at=now,
            processes=processes,
            cgroup=_part("cgroup", unread, lambda: self._cgroup_of(processes or (), unread)),
            node_oom_kills=_part("node_oom_kills", unread, self._node_oom_kills),
            log=None if self._log is None else _part("log", unread, self._log.read),
            limits=self._limits(processes or ()),
            unread=unread,
        )

    def close(self) -> None:
        """Close the cgroup and the log."""
        self._cgroup.close()
        if self._log is not None:
            self._log.close()

    def _cgroup_of(
        self, processes: Sequence[EngineProcess], unread: dict[str, str]
    ) -> CgroupMemory:
        ordered = sorted(processes, key=lambda process: _CGROUP_OF.index(process.role))
        return self._cgroup.read([process.pid for process in ordered], unread)

    def _limits(self, processes: Sequence[EngineProcess]) -> Mapping[str, int]:
        """The limits in the command line of the front, or else of the program that started it."""
        fronts_first = sorted(processes, key=lambda process: process.role is not ProcessRole.FRONT)
        lines = (limits_given(self._proc.words(process.pid)) for process in fronts_first)
        return next((limits for limits in lines if limits), {})

    def _node_oom_kills(self) -> int:
        kills = self._proc.oom_kills()
        if kills is None:
            raise HostUnreadable("/proc/vmstat has no oom_kill")
        return kills


def process_locator(
    url: str, pids: Sequence[int] = (), same_machine: bool | None = None
) -> ProcessLocator:
    """How to find the processes of the engine at a URL."""
    parts = urlsplit(url)
    if same_machine is None:
        same_machine = _is_local(parts.hostname or "")
    port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
    return ProcessLocator(pids=tuple(pids), port=port, same_machine=same_machine)


def _is_local(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return host in ("localhost", socket.gethostname()) or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified or _is_own(address)


def _is_own(address: IPv4Address | IPv6Address) -> bool:
    """Whether the kernel sends from an address what goes to it. Nothing is sent."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))
            return ip_address(probe.getsockname()[0]) == address
    except OSError:
        return False


def _part(name: str, unread: dict[str, str], read: Callable[[], Part]) -> Part | None:
    try:
        return read()
    except (OSError, ValueError, HostUnreadable) as error:
        # System calls raise ValueError for a path that contains a null byte.
        unread[name] = str(error)
        return None
