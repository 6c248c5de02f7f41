"""What is remembered of an engine from one poll to the next."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.analysis.failures.beats import Beat
from agent.analysis.failures.poll import Evidence
from agent.analysis.failures.restarts import figures
from agent.catalog.failure_lines import LineMeaning
from agent.records.engine import EngineSample
from agent.records.event import Confidence, EventKind
from agent.records.host import CgroupMemory, EngineProcess

Identities = frozenset[tuple[int, float]]
# What goes on, as events told of it, and when it was last seen.
Key = tuple[str, ...]
Active = Mapping[Key, float]


@dataclass(frozen=True, slots=True)
class Clue:
    """A line of the log that may explain what comes, and when it was last said."""

    at_s: float
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A pause that the engine was told to make, `at` when in Unix time.

    `polls_since` counts the polls since it was over, 0 while it lasts; `page_read` is whether the
    engine's page was read since it began.
    """

    at: float
    polls_since: int = 0
    page_read: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A time in which the engine's page cannot be had or the engine is taken for dead.

    `dead` is how sure its death is, None for not at all; a `firm` sign of death needs no second
    one. `cause` is the kind of event that told of it, once there was one.
    """

    since_s: float
    unreachable: bool = False
    dead: Confidence | None = None
    firm: bool = False
    polls_dead: int = 0
    at_start: bool = False
    cause: EventKind | None = None
    named_s: float = 0.0
    evidence: Evidence = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What shows that a rank computes, and for how long it has stood still with work to do."""

    beat: Beat | None = None
    steps: float | None = None
    beat_s: float = 0.0
    step_s: float = 0.0
    busy: bool = False
    stalled_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The pulses of an engine's ranks, and what a hang was `told` of: ranks, or a stopped process.

    The key of an engine that is not told of by rank is empty. `gone` are ranks that were given up:
    their cores are gone, and their figures may stay on the page. `excused_s` is for how long its
    front has not answered while its core computed.
    """

    pulses: Mapping[str, Pulse] = field(default_factory=dict)
    stopped_polls: int = 0
    excused_s: float = 0.0
    gone: frozenset[str] = frozenset()
    told: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """The memory of a watch over one engine. A new one knows nothing.

    Times are seconds of the polls' `clock_s`, which never goes back. `sample_s` is None for a
    sample that was read before this watch began.
    """

    clock_s: float | None = None
    sample: EngineSample | None = None
    sample_s: float | None = None
    reachable: bool = False
    healthy: bool = False
    asleep: bool = False
    fronts: Identities = frozenset()
    cores: Identities = frozenset()
    processes: tuple[EngineProcess, ...] | None = None
    cgroup: CgroupMemory | None = None
    node_oom_kills: int | None = None
    polls_since_node_kill: int | None = None
    pause: Pause | None = None
    kills_untold: int = 0
    clues: Mapping[LineMeaning, Clue] = field(default_factory=dict)
    log_spoke: bool = False
    front_ended: bool = False
    stopping: Clue | None = None
    outage: Outage | None = None
    gpus_held_since_s: Mapping[str, float] = field(default_factory=dict)
    heartbeat: Heartbeat = Heartbeat()
    active: Active = field(default_factory=dict)

    def last_figures(self) -> dict[str, str | float | None]:
        """The key figures of the last sample, for evidence; none where there never was one."""
        return figures(self.sample) if self.sample else {}
