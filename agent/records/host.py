"""One sample of the host: an engine's processes, memory cgroup and log lines."""

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

    `started_after_boot_s` distinguishes it from a later process with the same PID. `state` is the
    kernel's letter: R runs, S sleeps, D waits for a device or disk, T was stopped by a signal,
    t by a debugger. `cpu_s` is user and system time since its start. `cpu_wait_s` is how long its
    main thread was ready to run and had no processor, and `cpu_run_s` how long it ran; None if
    the kernel does not count that.
    """

    pid: int
    started_after_boot_s: float
    role: ProcessRole
    name: str
    state: str
    cpu_s: float
    cpu_wait_s: float | None = None
    cpu_run_s: float | None = None

    @property
    def identity(self) -> tuple[int, float]:
        """PID and start time, unique since boot."""
        return (self.pid, self.started_after_boot_s)

    @property
    def stopped(self) -> bool:
        """Whether it is stopped and needs a signal or a debugger to continue."""
        return self.state in ("T", "t")


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupMemory:
    """Memory of one cgroup, version 1 or 2; `inode` distinguishes it from a successor.

    Kills are counted since the cgroup was made. `limit_bytes` is None without a limit.
    """

    version: int
    path: str
    inode: int
    usage_bytes: int | None = None
    limit_bytes: int | None = None
    oom_kills: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFinding:
    """A line of the engine's log about a failure, cut to a readable length."""

    meaning: LineMeaning
    line: str
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSample:
    """The engine's log since the last sample: how many lines it had, and the findings."""

    lines: int = 0
    findings: tuple[LogFinding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """One sample of the machine that an engine runs on.

    A part that could not be read is None, and `unread` has the reason by part, such as processes,
    cgroup or log. Without any process, `processes` is empty. `node_oom_kills` counts the kills of
    the whole machine since boot. `limits` come from the engine's command line, by fact name.
    """

    at: float
    processes: tuple[EngineProcess, ...] | None = None
    cgroup: CgroupMemory | None = None
    node_oom_kills: int | None = None
    log: LogSample | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
