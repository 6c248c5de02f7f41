"""Builds polls of an engine for tests, and runs failure detection on them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent.analysis.failures import DetectionLimits, FailureDetection, Poll
from agent.catalog import engine_facts as fact
from agent.catalog.failure_lines import meaning_of
from agent.catalog.metric import Metric
from agent.records.engine import (
    CgroupMemory,
    EngineProcess,
    EngineSample,
    EngineStatus,
    HostSample,
    LogFinding,
    LogSample,
    ProcessRole,
)
from agent.records.event import Event
from agent.records.gpu import XidError

GPU = "GPU-11111111-2222-3333-4444-555555555555"
POLL_EVERY_S = 5.0

OOM_LINE = (
    "(EngineCore pid=9) ERROR 11-21 04:35:57 [core.py:1512] torch.OutOfMemoryError: CUDA out of "
    "memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.2 GiB "
    "is free."
)
FATAL_LINE = "ERROR 11-21 04:35:57 [core.py:1512] EngineCore encountered a fatal error."
CORE_LOST_LINE = "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"
STOP_LINE = "INFO 11-21 04:34:41 [launcher.py:254] [shutdown] API server: shutdown triggered"
FRONT_ENDED_LINE = "INFO:     Application shutdown complete."
CUDA_ERROR_LINE = "RuntimeError: CUDA error: unspecified launch failure"
START_FAILED_LINE = (
    "RuntimeError: Engine core initialization failed. See root cause above. "
    "Failed core proc(s): {'EngineCore': 1}"
)
SIZING_LINE = "ValueError: No available memory for the cache blocks. Try increasing"
PAUSE_LINE = (
    "(EngineCore pid=9) INFO 11-21 15:58:01 [scheduler.py:2756] setting pause state to PAUSED_ALL"
)
RESUME_LINE = (
    "(EngineCore pid=9) INFO 11-21 15:58:43 [scheduler.py:2756] setting pause state to UNPAUSED"
)
HANG_LINE = "TimeoutError: RPC call to execute_model timed out."


def process(
    role: ProcessRole, pid: int, *, started: float = 1.0, state: str = "S"
) -> EngineProcess:
    """One process of an engine."""
    return EngineProcess(
        pid=pid,
        started_after_boot_s=started,
        role=role,
        name=f"VLLM::{role.value}",
        state=state,
        cpu_s=1.0,
    )


FRONT = process(ProcessRole.FRONT, 10)
CORE = process(ProcessRole.CORE, 11)
WORKER = process(ProcessRole.WORKER, 12)
ALL = (FRONT, CORE)
NEXT = (process(ProcessRole.FRONT, 20, started=9.0), process(ProcessRole.CORE, 21, started=9.0))


def cgroup(kills: int | None, *, inode: int = 7) -> CgroupMemory:
    """The engine's cgroup after so many kills."""
    return CgroupMemory(
        version=2, path="/engine", inode=inode, usage_bytes=900, limit_bytes=1000, oom_kills=kills
    )


def logged(*lines: str, count: int | None = None) -> LogSample:
    """A log sample with these lines; `count` is the number of all lines that were read."""
    findings = []
    for line in lines:
        found = meaning_of(line)
        assert found is not None, line
        findings.append(LogFinding(meaning=found[0], line=line, exit_code=found[1]))
    return LogSample(lines=len(lines) if count is None else count, findings=tuple(findings))


def host(
    processes: Iterable[EngineProcess] | None = None,
    *,
    kills: int | None = None,
    inode: int = 7,
    node: int | None = None,
    log: LogSample | None = None,
) -> HostSample:
    """A host sample; a part that is not given could not be read."""
    return HostSample(
        at=0.0,
        processes=None if processes is None else tuple(processes),
        cgroup=None if kills is None else cgroup(kills, inode=inode),
        node_oom_kills=node,
        log=log,
    )


def xid(number: int) -> XidError:
    """An Xid that the driver reported."""
    return XidError(gpu=GPU, xid=number, at=0.0, count=1)


# The facts of a sample; None for unknown ones.
Facts = Mapping[Metric | tuple[Metric, str], float | None]

USUAL: Facts = {
    fact.REQUESTS_RUNNING: 4,
    fact.REQUESTS_WAITING: 0,
    fact.KV_CACHE_USAGE: 0.5,
    fact.PREEMPTIONS: 0,
    fact.AWAKE: 1,
}


class PolledEngine:
    """An engine that is polled every 5 s. Its steps and tokens grow unless a poll is `stalled`."""

    def __init__(self, limits: DetectionLimits | None = None, *, dialect: str = "vllm") -> None:
        self.now = 1000.0
        self.clock_s = 70.0
        self._dialect = dialect
        self._detection = FailureDetection(limits or DetectionLimits())
        self._tokens = 100.0
        self._started: float | None = 500.0

    def works(
        self,
        facts: Facts | None = None,
        *,
        stalled: bool = False,
        ranks: Mapping[str, Facts] | None = None,
        problems: Mapping[str, str] | None = None,
        after_s: float = POLL_EVERY_S,
        **poll: Any,
    ) -> tuple[Event, ...]:
        """A poll with a sample; `stalled` if the engine computed nothing since the last poll."""
        sample = self._sample(facts or {}, ranks or {}, stalled=stalled)
        known = {"sample": sample, "health": 200, "gpu_problems": problems or {}}
        return self._observe(after_s, **(known | poll))

    def fails(
        self, reason: str = "connection", *, after_s: float = POLL_EVERY_S, **poll: Any
    ) -> tuple[Event, ...]:
        """A poll without a sample."""
        return self._observe(after_s, failure=reason, **poll)

    def restarts(self, facts: Facts | None = None, **poll: Any) -> tuple[Event, ...]:
        """A poll after the engine was restarted: a new process, and all counters start at zero."""
        self._tokens = 0.0
        self._started = self.now
        return self.works(facts, **poll)

    @property
    def status(self) -> EngineStatus:
        """The state after the last poll."""
        status = self._detection.status
        assert status is not None, "it was polled"
        return status

    def hide_start_time(self) -> None:
        """Makes the start time of the process unknown in later polls."""
        self._started = None

    def _sample(self, facts: Facts, ranks: Mapping[str, Facts], *, stalled: bool) -> EngineSample:
        self._tokens += 0 if stalled else 50
        known: dict[Metric | tuple[Metric, str], float | None] = {
            **USUAL,
            fact.STEPS: self._tokens,
            fact.OUTPUT_TOKENS: self._tokens * 4,
            **facts,
        }
        sample = EngineSample(
            engine="chat",
            at=self.now,
            dialect=self._dialect,
            model="m",
            facts=_by_key(known),
            process_started_at=self._started,
        )
        by_rank = {rank: replace(sample, facts=_by_key(own)) for rank, own in ranks.items()}
        return replace(sample, ranks=by_rank)

    def _observe(self, after_s: float, **poll: Any) -> tuple[Event, ...]:
        found = Poll(engine="chat", at=self.now, clock_s=self.clock_s, **poll)
        self.now += after_s
        self.clock_s += after_s
        return self._detection.observe(found)


def _by_key(facts: Facts) -> dict[tuple[str, tuple[str, ...]], float]:
    return {_key(metric): value for metric, value in facts.items() if value is not None}


def _key(metric: Metric | tuple[Metric, str]) -> tuple[str, tuple[str, ...]]:
    if isinstance(metric, tuple):
        return metric[0].name, (metric[1],)
    return metric.name, ()


def kinds(events: Iterable[Event]) -> list[str]:
    """The kinds of the events."""
    return [event.kind.value for event in events]


def verdicts(events: Iterable[Event]) -> list[tuple[str, str]]:
    """The kinds and confidences of the events."""
    return [(event.kind.value, event.confidence.value) for event in events]


CHATTER = logged(count=3)
SILENCE = logged(count=0)


def engine_in_use() -> PolledEngine:
    """A working engine: the agent can read its processes, cgroup and log."""
    engine = PolledEngine()
    assert engine.works(host=host(ALL, kills=0, node=0, log=CHATTER)) == ()
    assert engine.works(host=host(ALL, kills=0, node=0, log=CHATTER)) == ()
    return engine


# Scenarios: polls of an engine, each followed by the events that it must give


@dataclass(frozen=True, slots=True)
class New:
    """A scenario begins with an engine that was not polled yet."""

    limits: DetectionLimits | None = None
    dialect: str = "vllm"


# A poll, or some; its events, as `HOST_OOM certain, RESTART certain`; evidence of one of them.
Part = New | Callable[[PolledEngine], Sequence[Event]] | str | Mapping[str, object]
Scenarios = Mapping[str, Sequence[Part]]


def works(
    sample: HostSample | None = None, facts: Facts | None = None, *, times: int = 1, **poll: Any
) -> Part:
    """Polls with a sample."""
    return lambda engine: [
        event for _ in range(times) for event in engine.works(facts, host=sample, **poll)
    ]


def dying(sample: HostSample | None = None, facts: Facts | None = None, **poll: Any) -> Part:
    """Polls with an exposition that stands still and a health check that fails."""
    return works(sample, facts, **{"stalled": True, "health": 503, **poll})


def fails(
    sample: HostSample | None = None, reason: str = "connection", *, times: int = 1, **poll: Any
) -> Part:
    """Polls without a sample."""
    return lambda engine: [
        event for _ in range(times) for event in engine.fails(reason, host=sample, **poll)
    ]


def restarts(sample: HostSample | None = None, facts: Facts | None = None, **poll: Any) -> Part:
    """A poll after a restart."""
    return lambda engine: engine.restarts(facts, host=sample, **poll)


def hides_start_time(engine: PolledEngine) -> Sequence[Event]:
    """Makes the start time of the process unknown in later polls."""
    engine.hide_start_time()
    return ()


def check(parts: Sequence[Part], start: Callable[[], PolledEngine] = engine_in_use) -> None:
    """Each poll gives the events that follow it, and no others."""
    engine, events, expected = start(), list[Event](), ""
    for part in (*parts, ""):
        if isinstance(part, New):
            engine = PolledEngine(part.limits, dialect=part.dialect)
        elif isinstance(part, Mapping):
            assert any(part.items() <= event.evidence.items() for event in events), events
        elif isinstance(part, str) and part:
            expected = part
        else:
            found = ", ".join(f"{kind} {confidence}" for kind, confidence in verdicts(events))
            assert found == expected, found
            events, expected = [] if isinstance(part, str) else list(part(engine)), ""
