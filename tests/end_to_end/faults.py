"""The faults, each with the alert that must report it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.end_to_end.site import GO_ON, STOP, Site, model_of
from tests.real_parts.alertmanager import PostedAlert
from tests.sources.nvml.fake_driver import gpu_uuid

Act = Callable[[Site], None]


def _passes(site: Site) -> None:
    """Does nothing: the fault ends by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of the engine of the same name, of a GPU or of an agent, and its alert.

    `window` is that of the engine's objective, where it has one. `beside`
    are tickets that may also fire.
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
        """Whether the fault is that of an engine."""
        return self.gpu in (None, 0)

    def is_main(self, labels: Mapping[str, str]) -> bool:
        """Whether an alert is the fault's own; of several on one budget, the page."""
        named = labels["alertname"] == self.alert
        return named and (self.alert != _BURN or labels["severity"] == "page")

    def is_reported_by(self, alert: PostedAlert, site: Site) -> bool:
        """Whether an alert has the labels of the place of this fault."""
        if self.of_agent:
            return alert.labels.get("instance") == site.agents[1]
        places = {"engine": self.name, "model": model_of(self.name)}
        if self.gpu is not None:
            places["gpu"] = gpu_uuid(self.gpu)
        return any(alert.labels.get(label) == value for label, value in places.items())


def _by_engine(name: str, alert: str, **fault: float | bool) -> Fault:
    """A fault that the simulated engine makes itself."""
    return Fault(
        name=name,
        alert=alert,
        begin=lambda site: site.engines[name].fail(**fault),
        end=lambda site: site.engines[name].fail(),
    )


def _with_objective(
    name: str, window: str, alert: str, *beside: str, **fault: float | bool
) -> Fault:
    """A fault of a simulated engine that has an objective."""
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


def _begin_slow_prefill(site: Site) -> None:
    site.engines[SLOW].fail(prefill_slowdown=20)
    site.mistaken_client.start()


def _end_slow_prefill(site: Site) -> None:
    site.mistaken_client.stop()
    site.engines[SLOW].fail()


_BURN = "LlmObjectiveBudgetBurn"
# Every request to it misses its objective. Beside them a client asks it for a model that it does
# not have: that mistake must neither be reported nor mute the page on the objective.
SLOW = "slow-prefill"

# Engines with a resource that only one can have.
ROLES = {
    "log": "killed",
    "gpu": "xid",
    "cgroup": "out-of-memory",
    "proxy": SLOW,
    "apart": "agent-killed",
}

FAULTS = (
    _by_engine("queue-surge", "LlmQueueDeep", surge=24),
    # Prometheus has just started: this fault is all of its last three days.
    Fault(
        name=SLOW,
        alert="LlmObjectiveOutage",
        begin=_begin_slow_prefill,
        end=_end_slow_prefill,
        window="15d",
        beside=frozenset({_BURN}),
    ),
    # The budget lasts for a while, so that tickets on latency may fire as early.
    _with_objective(
        "budget-burn",
        "1d",
        _BURN,
        *(_BURN, "LlmTtftOverLimit", "LlmQueueTimeHigh"),
        defer_ratio=0.42,
        defer_s=0.6,
    ),
    # The objective is missed as well, and the page on the engine explains it.
    _with_objective("errors", "15d", "LlmEngineAnswersErrors", _BURN, error_ratio=0.8),
    _with_objective("frozen", "15d", "LlmEngineHanging", _BURN, hang=True),
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
        # Ten minutes at lower clocks, added at once.
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
