"""Inhibitions: alerts that mute others, so that one cause sends one message."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agent.render.alerts.alert_rule import AGENT, ENGINE, ENGINE_MODEL, GPU, OBJECTIVE, Severity
from agent.render.alerts.explained_misses import EXPLAINED
from agent.render.alerts.gpu_alerts import MEMORY_XIDS
from agent.render.alerts.objective_alerts import BURN, OUTAGE
from agent.render.alerts.vllm_alerts import ON_MODEL, ON_PAGE
from agent.render.promql import among


@dataclass(frozen=True, slots=True)
class Inhibition:
    """While a source alert fires, it mutes the targets with equal values of the labels in `equal`.

    All of these alerts have the labels in `equal`, as Alertmanager takes two missing labels as
    equal. `only_sources` and `only_targets` are further matchers.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    equal: tuple[str, ...]
    only_sources: tuple[str, ...] = ()
    only_targets: tuple[str, ...] = ()

    def rule(self) -> dict[str, Any]:
        """The inhibition in the format of Alertmanager."""
        return {
            "source_matchers": [_named(self.sources), *self.only_sources],
            "target_matchers": [_named(self.targets), *self.only_targets],
            "equal": list(self.equal),
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
# Alerts on requests to an engine that makes no progress.
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
            only_sources=(f'tier="{tier}"',),
            only_targets=(f'tier=~"{"|".join(_TIERS[place:])}"',),
        )
        for place, tier in enumerate(_TIERS[:-1], start=1)
    ),
    # The page on an engine explains the misses of its users. Tickets stay: their windows are longer
    # than the trouble of an engine.
    Inhibition((EXPLAINED,), (OUTAGE, BURN), OBJECTIVE, only_targets=_PAGES),
    # The effect on users sends one message, that of the objective.
    Inhibition((OUTAGE, BURN), _LATENCY, OBJECTIVE, only_sources=_PAGES),
    Inhibition((OUTAGE, BURN), ("LlmQueueDeep",), ("model",), only_sources=_PAGES),
)

_OF_ENGINES = (
    # The cause of a death explains the outage and the failed requests.
    Inhibition(_DEATHS, ("LlmEngineDown", "LlmEngineNeverUp", "LlmEngineSilent"), ENGINE),
    Inhibition(
        (*_DEATHS, "LlmEngineDown", "LlmEngineHanging"), (*_LATENCY, *_ERRORS, *_STUCK), ENGINE
    ),
    # An engine is out of the rotation because it died, hangs or is down.
    Inhibition((*_DEATHS, "LlmEngineDown", "LlmEngineHanging"), ("LlmProxyEngineEjected",), ENGINE),
    # An engine that is down gives no fact at all.
    Inhibition((*_DEATHS, "LlmEngineDown"), ("LlmEngineFactMissing",), ENGINE),
    Inhibition(("LlmEngineSilent",), _STUCK, ENGINE),
    # A hanging engine may not answer at all.
    Inhibition(("LlmEngineHanging",), ("LlmEngineDown", "LlmEngineSilent"), ENGINE),
    Inhibition(("LlmEngineRestartLoop",), ("LlmEngineRestarted", "LlmEngineDown"), ENGINE),
    Inhibition(
        ("LlmRequestsFailing",), ("LlmErrorRatioOverLimit", "LlmEngineAnswersErrors"), ENGINE_MODEL
    ),
    # The engine's limits are the cause of the clients' 429 and 503.
    Inhibition(
        ("LlmAdmissionRejections",),
        ("LlmRequestsThrottled", "LlmErrorRatioOverLimit"),
        ENGINE_MODEL,
    ),
    Inhibition(
        ("LlmRequestsThrottled", "LlmRequestsTimingOut"), ("LlmErrorRatioOverLimit",), ENGINE_MODEL
    ),
    # Requests wait for the cache, not for a place in the batch.
    Inhibition(("LlmKvCacheSaturated",), ("LlmQueueDeep", "LlmQueueTimeHigh"), ENGINE_MODEL),
)

_OF_GPUS = (
    # The GPU's alert names the GPU and the fault; the engine's alert does not.
    Inhibition(("GpuLost", "GpuXidCritical"), ("LlmEngineGpuFault",), AGENT),
    Inhibition(("GpuXidCritical",), ("GpuLost", "GpuEccUncorrected"), GPU),
    Inhibition(("GpuLost", "GpuXidCritical"), _GPU_SIGNS, GPU),
    # The failed remap lasts longer than the Xid, and its runbook says what to do.
    Inhibition(
        ("GpuRowRemapFailed",),
        ("GpuXidCritical",),
        GPU,
        only_targets=_OF_MEMORY,
    ),
    Inhibition(("GpuRowRemapFailed",), ("GpuRowRemapPending", "GpuEccUncorrected"), GPU),
)

_OF_AGENTS = (
    Inhibition(("LlmAgentDown",), ("LlmAgentsMissing",), ()),
    Inhibition(("LlmAgentDown", "LlmAgentsMissing"), ("LlmObjectiveNotPublished",), ()),
    # Rows wait because the database refuses them.
    Inhibition(
        ("LlmAgentStoreFailing",),
        ("LlmAgentStoreBehind", "LlmAgentStageBehind", "LlmAgentJobLate"),
        AGENT,
    ),
)

_OF_VLLM_ALONE = (
    Inhibition(("VllmDown",), ("VllmMissing",), ()),
    Inhibition(("VllmDown",), (*_VLLM_STUCK, "VllmSilent", "VllmAnswersErrors"), ON_PAGE),
    Inhibition(("VllmSilent",), _VLLM_STUCK, ON_MODEL),
    Inhibition(("VllmKvCacheSaturated",), ("VllmQueueDeep",), ON_MODEL),
)

INHIBITIONS = (*_OF_OBJECTIVES, *_OF_ENGINES, *_OF_GPUS, *_OF_AGENTS, *_OF_VLLM_ALONE)


def inhibit_rules() -> Iterator[dict[str, Any]]:
    """All inhibitions in the format of Alertmanager."""
    return (inhibition.rule() for inhibition in INHIBITIONS)


def _named(names: Sequence[str]) -> str:
    return f'alertname=~"{"|".join(names)}"'
