"""What one poll of one engine brought, and the limits that it is judged by."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.catalog.reasons import FetchFailed
from agent.records.engine import EngineSample
from agent.records.event import Confidence, Event, EventKind
from agent.records.gpu import XidSeen
from agent.records.host import HostSample, LogFinding

Evidence = Mapping[str, str | float | None]

NO_CONNECTION = FetchFailed.CONNECTION
TIMED_OUT = FetchFailed.TIMEOUT
# Why a page was not had; with any other reason it was had and could not be read.
_UNREACHABLE = frozenset({NO_CONNECTION, TIMED_OUT, "http_status"})

HEALTHY = 200
# The answer of a health check that does not hold.
UNHEALTHY = 503


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """All that was seen of an engine at one time; what was not looked at is None or empty.

    `at` is Unix time and `clock_s` the same moment on a clock that nobody sets, for durations.
    Of `sample` and `failure`, the short reason why there is no sample, one is given, but for GPUs
    that are no engine's, where `engine` is None too. `health` is
    the HTTP status of the engine's health check. `xids` are those of the engine's GPUs since the
    last poll, `gpu_problems` those of its GPUs that are lost now, by a short word,
    `recovery_actions` what their drivers ask for, 0 for nothing, and `gpu_figures` what shall stand
    in the evidence of a death.

    The host must have been looked at after the page and the health check: whatever killed an
    engine that was found dead had then been counted.
    """

    engine: str | None
    at: float
    clock_s: float
    sample: EngineSample | None = None
    failure: str | None = None
    health: int | None = None
    host: HostSample | None = None
    xids: tuple[XidSeen, ...] = ()
    gpu_problems: Mapping[str, str] = field(default_factory=dict)
    recovery_actions: Mapping[str, float] = field(default_factory=dict)
    gpu_figures: Evidence = field(default_factory=dict)

    @property
    def unreachable(self) -> bool:
        """Whether the engine's page could not be had."""
        return self.failure in _UNREACHABLE

    @property
    def findings(self) -> tuple[LogFinding, ...]:
        """What the engine's log said, in its order."""
        return self.host.log.findings if self.host and self.host.log else ()

    def event(
        self,
        kind: EventKind,
        confidence: Confidence,
        evidence: Evidence,
        *,
        gpu: str | None = None,
    ) -> Event:
        """Something that this poll showed."""
        return Event(
            at=self.at,
            engine=self.engine,
            kind=kind,
            confidence=confidence,
            gpu=gpu,
            evidence=evidence,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionLimits:
    """When something counts as a failure. Times in seconds.

    An engine hangs when its heartbeat stood still for longer than `hang_s` and than `hang_steps`
    of its recent steps. A line or an Xid explains a death at most `clue_s` later. A pressure that
    was not seen for `quiet_s` is over. A driver that holds its calls for
    `held_s` is not merely slow.
    """

    hang_s: float = 30.0
    hang_steps: float = 10.0
    clue_s: float = 30.0
    quiet_s: float = 60.0
    held_s: float = 30.0
