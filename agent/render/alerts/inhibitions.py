"""Which alert keeps which others from being told: one cause is one message."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agent.render.alerts.alert_rule import AGENT, ENGINE, ENGINE_MODEL, GPU, OBJECTIVE, Severity
from agent.render.alerts.explained_misses import EXPLAINED
from agent.render.alerts.gpu_alerts import MEMORY_XIDS
from agent.render.alerts.objective_alerts import BURN, OUTAGE
from agent.render.alerts.vllm_series import ON_MODEL, ON_PAGE
from agent.render.promql import among


@dataclass(frozen=True, slots=True)
class Inhibition:
    """While one of `why` fires, none of `what` is told whose labels in `same` are equal.

    A label that both lack counts as equal, so all of these alerts have the labels in `same`.
    `only_why` and `only_what` are matchers that narrow them down.
    """

    why: tuple[str, ...]
    what: tuple[str, ...]
    same: tuple[str, ...]
    only_why: tuple[str, ...] = ()
    only_what: tuple[str, ...] = ()

    def rule(self) -> dict[str, Any]:
        """The same as Alertmanager takes it."""
        return {
            "source_matchers": [_named(self.why), *self.only_why],
            "target_matchers": [_named(self.what), *self.only_what],
            "equal": list(self.same),
        }


_PAGES = (f'severity="{Severity.PAGE}"',)
_TIERS = ("1", "2", "3", "4")

_LATENCY = ("LlmTtftOverLimit", "LlmTpotOverLimit", "LlmDurationOverLimit", "LlmQueueTimeHigh")
_DEATHS = (
    "LlmCudaOutOfMemory",
    "LlmHostOutOfMemory",
    "LlmEngineGpuFault",
    "LlmEngineSizingError",
    "LlmEngineDied",
)
_ERRORS = ("LlmErrorRatioOverLimit", "LlmRequestsFailing", "LlmEngineAnswersErrors")
# What is left of requests to an engine that does not work on them.
_STUCK = (
    *("LlmRequestsTimingOut", "LlmRequestsThrottled", "LlmAdmissionRejections"),
    *("LlmQueueDeep", "LlmKvCacheSaturated"),
)
_GPU_SIGNS = ("GpuRecoveryWanted", "GpuThrottled", "GpuRowRemapPending", "GpuNvlinkErrors")

_OF_MEMORY = (among("xid", MEMORY_XIDS).text,)

_VLLM_LATENCY = ("VllmTtftOverLimit", "VllmTpotOverLimit", "VllmDurationOverLimit")
_VLLM_STUCK = (*_VLLM_LATENCY, "VllmQueueDeep", "VllmKvCacheSaturated")

_OF_OBJECTIVES = (
    # Of the alerts on one objective and model, only the most urgent.
    Inhibition((OUTAGE,), (BURN,), OBJECTIVE),
    *(
        Inhibition(
            (BURN,),
            (BURN,),
            OBJECTIVE,
            only_why=(f'tier="{tier}"',),
            only_what=(f'tier=~"{"|".join(_TIERS[place:])}"',),
        )
        for place, tier in enumerate(_TIERS[:-1], start=1)
    ),
    # The page on an engine says why its users miss what they were promised; tickets stay, since
    # what is left of a budget outlasts any engine's trouble.
    Inhibition((EXPLAINED,), (OUTAGE, BURN), OBJECTIVE, only_what=_PAGES),
    # What the user feels is told once, by the objective.
    Inhibition((OUTAGE, BURN), _LATENCY, OBJECTIVE, only_why=_PAGES),
    Inhibition((OUTAGE, BURN), ("LlmQueueDeep",), ("model",), only_why=_PAGES),
)

_OF_ENGINES = (
    # What an engine died of says more than that it is gone, and than what it answered meanwhile.
    Inhibition(_DEATHS, ("LlmEngineDown", "LlmEngineNeverUp", "LlmEngineSilent"), ENGINE),
    Inhibition(
        (*_DEATHS, "LlmEngineDown", "LlmEngineHanging"), (*_LATENCY, *_ERRORS, *_STUCK), ENGINE
    ),
    Inhibition(("LlmEngineSilent",), _STUCK, ENGINE),
    # One that hangs may answer nothing at all.
    Inhibition(("LlmEngineHanging",), ("LlmEngineDown", "LlmEngineSilent"), ENGINE),
    Inhibition(("LlmEngineRestartLoop",), ("LlmEngineRestarted", "LlmEngineDown"), ENGINE),
    Inhibition(
        ("LlmRequestsFailing",), ("LlmErrorRatioOverLimit", "LlmEngineAnswersErrors"), ENGINE_MODEL
    ),
    # The engine's own limits say why its clients get 429 and 503.
    Inhibition(
        ("LlmAdmissionRejections",),
        ("LlmRequestsThrottled", "LlmErrorRatioOverLimit"),
        ENGINE_MODEL,
    ),
    Inhibition(
        ("LlmRequestsThrottled", "LlmRequestsTimingOut"), ("LlmErrorRatioOverLimit",), ENGINE_MODEL
    ),
    # Requests queue up for the cache, and not for a place in the batch.
    Inhibition(("LlmKvCacheSaturated",), ("LlmQueueDeep", "LlmQueueTimeHigh"), ENGINE_MODEL),
)

_OF_GPUS = (
    # The GPU's own alert names what is wrong with it; the engine's knows no GPU by name.
    Inhibition(("GpuLost", "GpuXidCritical"), ("LlmEngineGpuFault",), AGENT),
    Inhibition(("GpuXidCritical",), ("GpuLost", "GpuEccUncorrected"), GPU),
    Inhibition(("GpuLost", "GpuXidCritical"), _GPU_SIGNS, GPU),
    # The lasting one of the two, and the one that says what to do.
    Inhibition(
        ("GpuRowRemapFailed",),
        ("GpuXidCritical",),
        GPU,
        only_what=(among("xid", MEMORY_XIDS).text,),
    ),
    Inhibition(("GpuRowRemapFailed",), ("GpuRowRemapPending", "GpuEccUncorrected"), GPU),
)

_OF_AGENTS = (
    Inhibition(("LlmAgentDown",), ("LlmAgentsMissing",), ()),
    Inhibition(("LlmAgentDown", "LlmAgentsMissing"), ("LlmObjectiveNotPublished",), ()),
    # A database that refuses rows keeps them waiting.
    Inhibition(("LlmAgentStoreFailing",), ("LlmAgentStoreBehind",), AGENT),
)

_OF_VLLM_ALONE = (
    Inhibition(("VllmDown",), ("VllmMissing",), ()),
    Inhibition(("VllmDown",), (*_VLLM_STUCK, "VllmSilent", "VllmAnswersErrors"), ON_PAGE),
    Inhibition(("VllmSilent",), _VLLM_STUCK, ON_MODEL),
    Inhibition(("VllmKvCacheSaturated",), ("VllmQueueDeep",), ON_MODEL),
)

INHIBITIONS = (*_OF_OBJECTIVES, *_OF_ENGINES, *_OF_GPUS, *_OF_AGENTS, *_OF_VLLM_ALONE)


def inhibit_rules() -> Iterator[dict[str, Any]]:
    """All of them as Alertmanager takes them."""
    return (inhibition.rule() for inhibition in INHIBITIONS)


def _named(names: Sequence[str]) -> str:
    return f'alertname=~"{"|".join(names)}"'
