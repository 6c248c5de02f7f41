"""What one poll of one engine brings, and the limits that detectors apply to it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from agent.catalog.failure_lines import LineMeaning
from agent.catalog.reasons import NO_ANSWER, FetchFailed
from agent.records.engine import EngineSample
from agent.records.event import Confidence, Event, EventKind
from agent.records.gpu import XidError
from agent.records.host import CgroupMemory, EngineProcess, HostSample, LogFinding

Evidence = Mapping[str, str | float | None]

NO_CONNECTION = FetchFailed.CONNECTION
TIMED_OUT = FetchFailed.TIMEOUT
# With any other reason the engine sent its metrics, but they could not be read.
_UNREACHABLE = NO_ANSWER | {FetchFailed.HTTP_STATUS}

HEALTHY = 200
UNHEALTHY = 503


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """All samples of one engine at one time. What was not read is None or empty.

    `at` is Unix time. `clock_s` is the same moment on a clock that is never set, for durations.
    Either `sample` or `failure` is given: `failure` is the short reason why there is no sample.
    GPUs without an engine have neither, and `engine` is None. `health` is the HTTP status of the
    health check. `xids` are new since the last poll. `gpu_problems` are the GPUs that cannot be
    read, lost or not, with a reason word each. `recovery_actions` are what drivers ask for, 0 for
    nothing. `gpu_figures` become evidence of a death.

    The host is read after the metrics and the health check, so that a kill that ended the engine
    is counted already.
    """

    engine: str | None
    at: float
    clock_s: float
    sample: EngineSample | None = None
    failure: str | None = None
    health: int | None = None
    host: HostSample | None = None
    xids: tuple[XidError, ...] = ()
    gpu_problems: Mapping[str, str] = field(default_factory=dict)
    recovery_actions: Mapping[str, float] = field(default_factory=dict)
    gpu_figures: Evidence = field(default_factory=dict)

    @property
    def unreachable(self) -> bool:
        """Whether the engine sent no metrics and does not say that it is healthy."""
        return self.failure in _UNREACHABLE and self.health != HEALTHY

    @property
    def processes(self) -> tuple[EngineProcess, ...] | None:
        """The engine's processes; None if they could not be read."""
        return self.host.processes if self.host else None

    @property
    def counting_cgroup(self) -> CgroupMemory | None:
        """The engine's cgroup; None if its kills could not be read."""
        cgroup = self.host.cgroup if self.host else None
        return cgroup if cgroup and cgroup.oom_kills is not None else None

    @property
    def findings(self) -> tuple[LogFinding, ...]:
        """The findings in the engine's log, oldest first."""
        return self.host.log.findings if self.host and self.host.log else ()

    def lines(self, *meanings: LineMeaning) -> Iterator[str]:
        """The lines of the log that have one of these meanings, oldest first."""
        return (finding.line for finding in self.findings if finding.meaning in meanings)

    def event(
        self, kind: EventKind, confidence: Confidence, evidence: Evidence, gpu: str | None = None
    ) -> Event:
        """An event at the time of this poll."""
        event = Event(at=self.at, engine=self.engine, kind=kind, confidence=confidence, gpu=gpu)
        return replace(event, evidence=evidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionLimits:
    """When something counts as a failure. All times in seconds.

    An engine hangs if it makes no step for longer than `hang_s` and than `hang_steps` of its
    recent steps. A log line or an Xid explains a death at most `clue_s` later. A pressure is over
    after `quiet_s` without it. A driver that holds its calls for `held_s` is not merely slow.
    """

    hang_s: float = 30.0
    hang_steps: float = 10.0
    clue_s: float = 30.0
    quiet_s: float = 60.0
    held_s: float = 30.0
