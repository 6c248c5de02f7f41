"""What detectors find at one poll and hand to the detectors that come after them."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from agent.analysis.failures.poll import Evidence
from agent.catalog.failure_lines import LineMeaning
from agent.records.event import Confidence, EventKind

# The key of a recent event that explains a death, even if the next try to start has begun.
EXPLAINS = "explains"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A time in which an engine cannot be reached or is dead.

    `dead` is the confidence in its death, None if it is not dead. Firm evidence of a death needs
    no second poll. `cause` is the kind of the event that explains the death, reported at `named_s`.
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


@dataclass(slots=True)
class Findings:
    """The findings of one poll so far.

    `lines` are recent log lines by meaning, the first of each. `stop_line` is the line of the log
    that says that the engine was ordered to stop. `paused` is whether it is paused, `pause_shows`
    whether its metrics may show a pause, and `paused_at` is evidence of its last one. `killed` and
    `gpu_fault` are whether a recent event explains a death, `killed_near` whether one may.
    """

    lines: Mapping[LineMeaning, str] = field(default_factory=dict)
    paused: bool = False
    pause_shows: bool = False
    paused_at: Evidence = field(default_factory=dict)
    stop_line: str | None = None
    outage: Outage | None = None
    killed: bool = False
    killed_near: bool = False
    gpu_fault: bool = False

    @property
    def dead(self) -> Confidence | None:
        """The confidence in the engine's death; None if it is not dead."""
        return self.outage.dead if self.outage else None

    @property
    def cause(self) -> EventKind | None:
        """The kind of the event that explains the outage, if any."""
        return self.outage.cause if self.outage else None

    def explain_outage(self, cause: EventKind, clock_s: float) -> None:
        """Give the outage its cause, unless there is none or it has one."""
        if self.outage is not None and self.outage.cause is None:
            self.outage = replace(self.outage, cause=cause, named_s=clock_s)


class Ongoing:
    """Conditions that last, each under a key, with the clock time at which it was found last."""

    def __init__(self, quiet_s: float) -> None:
        """A condition is over when it was not found for `quiet_s`."""
        self._quiet_s = quiet_s
        self._last_s: dict[Hashable, float] = {}

    def begins(self, key: Hashable, clock_s: float) -> bool:
        """Note that the condition is found now. True if it was over, or never found before."""
        last_s = self._last_s.get(key)
        self._last_s[key] = clock_s
        return last_s is None or clock_s - last_s >= self._quiet_s

    def lately(self, key: Hashable, clock_s: float, within_s: float) -> bool:
        """Whether the condition was found in the last `within_s`."""
        last_s = self._last_s.get(key)
        return last_s is not None and clock_s - last_s <= within_s

    def end(self, *keys: Hashable) -> None:
        """Note that these conditions are over."""
        for key in keys:
            self._last_s.pop(key, None)
