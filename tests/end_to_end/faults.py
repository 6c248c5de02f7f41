"""The faults, each with the alert that must tell it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.end_to_end.site import GO_ON, STOP, Site, model_of
from tests.real_parts.webhook import Told
from tests.sources.nvml.fake_driver import gpu_uuid

Act = Callable[[Site], None]


def _passes(site: Site) -> None:
    """It is over by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of the engine of the same name, of a GPU or of an agent, and what tells it.

    `window` is that of the objective of its users, where they were promised something. `beside`
    are tickets that may rightly come as well.
    """

    name: str
    alert: str
    begin: Act
    end: Act = _passes
    window: str | None = None
    gpu: int | None = None
    of_agent: bool = False
    beside: frozenset[str] = frozenset()

    @property
    def of_engine(self) -> bool:
        """Whether an engine of its own has it."""
        return self.gpu in (None, 0)

    def is_main(self, labels: Mapping[str, str]) -> bool:
        """Whether an alert is the fault's own: of a budget's several, the page."""
        named = labels["alertname"] == self.alert
        return named and (self.alert != _BURN or labels["severity"] == "page")

    def is_told_by(self, told: Told, site: Site) -> bool:
        """Whether an alert speaks of where this fault was made."""
        if self.of_agent:
            return told.labels.get("instance") == site.agents[1]
        places = {"engine": self.name, "model": model_of(self.name)}
        if self.gpu is not None:
            places["gpu"] = gpu_uuid(self.gpu)
        return any(told.labels.get(label) == value for label, value in places.items())


def _by_engine(name: str, alert: str, **fault: float | bool) -> Fault:
    """One that the simulated engine makes itself."""
    return Fault(
        name=name,
        alert=alert,
        begin=lambda site: site.engines[name].fail(**fault),
        end=lambda site: site.engines[name].fail(),
    )


def _promised(name: str, window: str, alert: str, *beside: str, **fault: float | bool) -> Fault:
    """The same on an engine whose users were promised something."""
    return Fault(
        name=name,
        alert=alert,
        begin=lambda site: site.engines[name].fail(**fault),
        end=lambda site: site.engines[name].fail(),
        window=window,
        beside=frozenset(beside),
    )


def _begin_oom(site: Site) -> None:
    site.kernel_killed("out-of-memory", 1)
    site.engines["out-of-memory"].kill()


def _end_oom(site: Site) -> None:
    site.engines["out-of-memory"].launch()
    site.kernel_killed("out-of-memory", 1)


_BURN = "LlmObjectiveBudgetBurn"

# Which engines have what only one can have.
ROLES = {"log": "killed", "gpu": "xid", "cgroup": "out-of-memory", "apart": "agent-killed"}

FAULTS = (
    _by_engine("queue-surge", "LlmQueueDeep", surge=12),
    # Prometheus is young: what it remembers of three days is this fault.
    _promised("slow-prefill", "15d", "LlmObjectiveOutage", _BURN, prefill_slowdown=20),
    # The budget lasts for a while, so that tickets on latency may be as soon.
    _promised(
        "budget-burn",
        "1d",
        _BURN,
        *(_BURN, "LlmTtftOverLimit", "LlmQueueTimeHigh"),
        defer_ratio=0.42,
        defer_s=0.6,
    ),
    # What their users were promised is missed as well, and the page on the engine says why.
    _promised("errors", "15d", "LlmEngineAnswersErrors", _BURN, error_ratio=0.8),
    _promised("frozen", "15d", "LlmEngineHanging", _BURN, hang=True),
    _by_engine("kv-pressure", "LlmKvCacheSaturated", kv_taken=0.955),
    Fault(
        name="paused",
        alert="LlmEngineHanging",
        begin=lambda site: site.engines["paused"].send(STOP),
        end=lambda site: site.engines["paused"].send(GO_ON),
    ),
    Fault(
        name="killed",
        alert="LlmEngineDied",
        begin=lambda site: site.engines["killed"].kill(),
        end=lambda site: site.engines["killed"].launch(),
        window="15d",
        beside=frozenset({_BURN}),
    ),
    Fault(
        name="stopped",
        alert="LlmEngineDown",
        begin=lambda site: site.engines["stopped"].stop(),
        end=lambda site: site.engines["stopped"].launch(),
    ),
    Fault(
        name="out-of-memory",
        alert="LlmHostOutOfMemory",
        begin=_begin_oom,
        end=_end_oom,
    ),
    Fault(
        name="xid",
        alert="GpuXidCritical",
        gpu=0,
        begin=lambda site: site.drive("xid 0 79 -1 -1"),
    ),
    Fault(
        name="gpu-lost",
        alert="GpuLost",
        gpu=1,
        begin=lambda site: site.drive("lose 1 15"),
        end=lambda site: site.drive("lose 1 0"),
    ),
    Fault(
        name="throttled",
        alert="GpuThrottled",
        gpu=2,
        # Ten minutes of time at lower clocks, all at once.
        begin=lambda site: site.drive("field 2 270 600000000000"),
    ),
    Fault(
        name="agent-killed",
        alert="LlmAgentDown",
        of_agent=True,
        begin=lambda site: site.other_agent.kill(),
        end=lambda site: site.other_agent.start(),
    ),
)
