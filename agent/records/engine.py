"""Values that are read of an engine and of the host that it runs on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from agent.catalog.engine_states import ProbedState
from agent.catalog.failure_lines import LineMeaning
from agent.records.gpu import Facts
from agent.records.request import RequestRecord


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Cumulative counts of one engine histogram, one per bound; the last bound is +inf."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """One sample of one engine, merged over its data-parallel ranks.

    `facts` maps (fact name, label values in the fact's own order) to a number;
    `histograms` maps a fact name to its snapshot. Unknown facts are absent. With several ranks,
    `ranks` has the facts of each one that show whether and how fast it computes; they are not
    stored. A counter or a histogram of `families` that has no value yet is zero; `families` are
    not stored either. `kept` are the parts of counters that ranks and replicas had counted when
    they left.
    """

    engine: str
    at: float
    dialect: str
    model: str | None
    facts: Facts
    histograms: Mapping[str, HistogramSnapshot] = field(default_factory=dict)
    process_started_at: float | None = None
    ranks: Mapping[str, "EngineSample"] = field(default_factory=dict)
    families: frozenset[str] = frozenset()
    kept: Facts = field(default_factory=dict)

    def fact(self, name: str, *labels: str) -> float | None:
        """Return the value of one fact, None if unknown."""
        return self.facts.get((name, labels))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """The state of an engine at its last poll, at `read_at`. Unix times.

    `why` is the kind of the event or the failure of the poll behind the state, None without one.
    """

    state: ProbedState
    since: float
    read_at: float
    why: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """The sender of a span: the configured engine and its model, None if unknown."""

    engine: str | None
    model: str | None


class EngineStep(NamedTuple):
    """One step of an engine. Times in Unix seconds, durations in seconds, unknown None.

    `duration_s` is the time since the last step ended, or the engine's own measure of the step. It
    is unknown of the first step after the engine was idle. `waiting_capacity` and
    `waiting_deferred` are the requests that waited at its end; of the deferred ones,
    `waiting_kv_transfer` waited for KV from elsewhere. `kv_usage` is from 0 to 1. `preempted`
    counts requests that run again after a preemption. `rank` is the data-parallel one.

    With `tokens_of_step`, `prefill_tokens` and `decode_tokens` were computed in this step.
    Otherwise `prefill_tokens` are all tokens computed of the prompts whose prefill ended in it.
    """

    engine: str
    ended_at: float
    duration_s: float | None
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting_capacity: int
    waiting_deferred: int
    kv_usage: float
    preempted: int
    waiting_kv_transfer: int = 0
    rank: int = 0
    tokens_of_step: bool = False


class EndedRequest(NamedTuple):
    """A request that the engine finished or dropped, with the engine's own figures.

    `request_id` is that of the request's span. Durations in seconds, unknown None. `finish_reason`
    is `abort` if the client left or the engine dropped the request.
    """

    engine: str
    request_id: str
    ended_at: float
    finish_reason: str
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    preemptions: int
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    e2e_s: float | None
    ttft_s: float | None = None


class ServedRequest(NamedTuple):
    """A request as the middleware in its engine's front saw it, with the engine's own figures.

    `record` is that of a proxy. `choices` are the engine's figures of its choices, as far as there
    are any. `proxied` says that it came through the agent's proxy, which has a record of it, too.
    """

    record: RequestRecord
    choices: tuple[EndedRequest, ...] = ()
    proxied: bool = False


class LoadingSpan(NamedTuple):
    """A span that an engine sent while it loaded. Unix times."""

    engine: str
    name: str
    began_at: float
    ended_at: float


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
    """The engine's log since the last sample: how many lines it had, and the findings.

    `expert_balance` is the mean load of the ranks' experts over the highest, from 0 to 1, by the
    lines on expert balance; None without any.
    """

    lines: int = 0
    findings: tuple[LogFinding, ...] = ()
    expert_balance: float | None = None


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
