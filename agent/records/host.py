"""What the machine told of an engine: its processes, its memory cgroup, the lines of its log."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from agent.catalog.failure_lines import LineMeaning


class ProcessRole(StrEnum):
    """What a process does for the engine."""

    FRONT = "front"
    CORE = "core"
    WORKER = "worker"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcess:
    """One process of an engine.

    `started_after_boot_s` tells it apart from a later one that got the same PID. `state` is the
    kernel's letter: R runs, S sleeps, D waits for a device or disk, T was stopped by a signal,
    t by a debugger. `cpu_s` is user and system time since its start.
    """

    pid: int
    started_after_boot_s: float
    role: ProcessRole
    name: str
    state: str
    cpu_s: float

    @property
    def identity(self) -> tuple[int, float]:
        """What no other process since boot shares."""
        return (self.pid, self.started_after_boot_s)

    @property
    def stopped(self) -> bool:
        """Whether the kernel will not run it until someone lets it go on."""
        return self.state in ("T", "t")


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupMemory:
    """The memory side of one cgroup, version 1 or 2, whose `inode` tells it from a successor.

    Kills are counted since the cgroup was made; `oom_kills_local` leaves out those of cgroups
    below it. `limit_bytes` is None where the cgroup sets none.
    """

    version: int
    path: str
    inode: int
    usage_bytes: int | None = None
    limit_bytes: int | None = None
    oom_kills: int | None = None
    oom_kills_local: int | None = None
    oom_group_kills: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFinding:
    """A line of the engine's log that says something of its fate, cut to a readable length."""

    meaning: LineMeaning
    line: str
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSample:
    """What the engine's log said since the last look; `dropped` counts what was not read."""

    lines: int = 0
    findings: tuple[LogFinding, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """One look at the machine that an engine runs on.

    Whatever could not be seen is None, and `unread` says why, by part: processes, cgroup, log and
    so on. No processes at all is the empty tuple. `node_oom_kills` counts the kills of the whole
    machine since boot. `limits` are those that the engine's command line gives, by fact name.
    """

    at: float
    processes: tuple[EngineProcess, ...] | None = None
    cgroup: CgroupMemory | None = None
    node_oom_kills: int | None = None
    log: LogSample | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)

    @property
    def front_cpu_s(self) -> float | None:
        """CPU seconds of the processes that take requests, since their start; None if unread."""
        fronts = [p.cpu_s for p in self.processes or () if p.role is ProcessRole.FRONT]
        return sum(fronts) if fronts else None
