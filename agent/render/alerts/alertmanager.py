"""The configuration of Alertmanager: receivers, inhibitions and routes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agent.analysis.burn_rates import BURN, OUTAGE
from agent.catalog.time_units import HOUR_S, MINUTE_S
from agent.render.alerts.agent_alerts import WATCHDOG
from agent.render.alerts.alert_rule import (
    AGENT,
    ENGINE,
    ENGINE_MODEL,
    GPU,
    OBJECTIVE,
    ON_PAGES,
    RuleOptions,
    Severity,
    Timings,
)
from agent.render.alerts.gpu_alerts import MEMORY_XIDS
from agent.render.alerts.objective_alerts import EXPLAINED, PAGED_LATELY
from agent.render.alerts.vllm_alerts import ON_MODEL, ON_PAGE
from agent.render.promql import among

PAGE, TICKET, DEADMAN = "page", "ticket", "deadman"
DEFAULT_SECRETS = "/etc/alertmanager/secrets"

_DETAILS = (
    "{{ range .Alerts }}*{{ .Annotations.summary }}*\n{{ .Annotations.description }}\n"
    "{{ if .Annotations.dashboard_url }}<{{ .Annotations.dashboard_url }}|Dashboard> · {{ end }}"
    "<{{ .Annotations.runbook_url }}|Runbook>\n{{ end }}"
)
_TITLE = (
    '[{{ .Status | toUpper }}{{ if eq .Status "firing" }} {{ .Alerts.Firing | len }}{{ end }}] '
    "{{ .CommonLabels.alertname }}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receivers:
    """The receivers; None or False leaves one out.

    `slack_pages` and `slack_tickets` are channels. `webhook` is a URL that gets all alerts as JSON.
    `deadman` is the URL of an outside service that raises the alarm when the watchdog's messages
    stop. `secrets` is a folder on Alertmanager's machine with the files `pagerduty_routing_key`,
    `slack_api_url` and `webhook_token`; each is read only if it is used.
    """

    pagerduty: bool = False
    slack_pages: str | None = None
    slack_tickets: str | None = None
    webhook: str | None = None
    webhook_token: bool = False
    deadman: str | None = None
    secrets: str = DEFAULT_SECRETS

    def configured(self) -> list[dict[str, Any]]:
        """The receivers of all routes; Alertmanager sends nothing to an empty one."""
        return [
            {"name": PAGE, **self._pagerduty(), **self._slack(self.slack_pages), **self._webhook()},
            {"name": TICKET, **self._slack(self.slack_tickets), **self._webhook()},
            {"name": DEADMAN, **self._deadman()},
        ]

    def silences(self) -> Iterator[str]:
        """A sentence on each route without a receiver, with the option that sets one."""
        named = {receiver["name"] for receiver in self.configured() if len(receiver) > 1}
        for name, sentence in _SILENCES.items():
            if name not in named:
                yield sentence

    def _pagerduty(self) -> dict[str, Any]:
        config = {
            "routing_key_file": f"{self.secrets}/pagerduty_routing_key",
            "send_resolved": True,
            "severity": "critical",
            "description": "{{ .CommonLabels.alertname }}: "
            "{{ (index .Alerts 0).Annotations.summary }}",
            "client": "goodput-agent",
            "client_url": "{{ (index .Alerts 0).Annotations.dashboard_url }}",
            "links": [
                {"href": "{{ (index .Alerts 0).Annotations.runbook_url }}", "text": "Runbook"},
            ],
            "details": {"description": "{{ (index .Alerts 0).Annotations.description }}"},
        }
        return {"pagerduty_configs": [config]} if self.pagerduty else {}

    def _slack(self, channel: str | None) -> dict[str, Any]:
        config = {
            "api_url_file": f"{self.secrets}/slack_api_url",
            "channel": channel,
            "send_resolved": True,
            "title": _TITLE,
            "title_link": "{{ (index .Alerts 0).Annotations.dashboard_url }}",
            "text": _DETAILS,
        }
        return {"slack_configs": [config]} if channel else {}

    def _webhook(self) -> dict[str, Any]:
        config: dict[str, Any] = {"url": self.webhook, "send_resolved": True}
        if self.webhook_token:
            token = f"{self.secrets}/webhook_token"
            config["http_config"] = {"authorization": {"credentials_file": token}}
        return {"webhook_configs": [config]} if self.webhook else {}

    def _deadman(self) -> dict[str, Any]:
        # Often a third party's service, which must not see the webhook's token.
        config = {"url": self.deadman, "send_resolved": False}
        return {"webhook_configs": [config]} if self.deadman else {}


_SILENCES = {
    PAGE: "PAGES REACH NOBODY. Alertmanager only shows them on its own page: name a receiver with "
    "--pagerduty, --slack-pages or --webhook.",
    TICKET: "TICKETS REACH NOBODY. Alertmanager only shows them on its own page: name a receiver "
    "with --slack-tickets or --webhook.",
    DEADMAN: "NO DEAD MAN'S SWITCH. If Prometheus or Alertmanager stops, no alert arrives and "
    "nothing reports that: set --deadman to the URL of an outside service that raises the alarm "
    "when the message of each minute is missing.",
}


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

    def rule(self, shared: Iterable[str] = ()) -> dict[str, Any]:
        """The inhibition in the format of Alertmanager; all alerts have the labels in `shared`."""
        return {
            "source_matchers": [_named(self.sources), *self.only_sources],
            "target_matchers": [_named(self.targets), *self.only_targets],
            "equal": [*self.equal, *shared],
        }


_PAGES = (ON_PAGES.text,)
_TIERS = ("1", "2", "3", "4")

_LATENCY = (
    *("LlmTtftOverLimit", "LlmTpotOverLimit", "LlmDurationOverLimit"),
    *("LlmQueueTimeHigh", "LlmEngineMissesObjective"),
)
_OF_USERS = (*_LATENCY, "LlmErrorRatioOverLimit")
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
    *("LlmQueueDeep", "LlmKvCacheSaturated", "LlmRanksUneven"),
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
            only_targets=(f'tier=~"{"|".join(_TIERS[index:])}"',),
        )
        for index, tier in enumerate(_TIERS[:-1], start=1)
    ),
    # The page on an engine explains the misses of its users. Tickets stay: their windows are longer
    # than the trouble of an engine.
    Inhibition((EXPLAINED,), (OUTAGE, BURN), OBJECTIVE, only_targets=_PAGES),
    # The effect on users sends one message, that of the objective. The misses of a page that has
    # ended are in the windows of slower alerts for a while.
    Inhibition((OUTAGE, BURN), _OF_USERS, OBJECTIVE, only_sources=_PAGES),
    Inhibition((PAGED_LATELY,), (BURN,), OBJECTIVE, only_targets=('tier="2"',)),
    Inhibition((PAGED_LATELY,), _OF_USERS, OBJECTIVE),
    Inhibition(
        (OUTAGE, BURN), ("LlmQueueDeep", "LlmTooFewReplicas"), ("model",), only_sources=_PAGES
    ),
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


def _named(names: Sequence[str]) -> str:
    return f'alertname=~"{"|".join(names)}"'


# The receiver of alerts that only mute others.
_NOBODY = "nobody"


def alertmanager(timings: Timings, receivers: Receivers, options: RuleOptions) -> dict[str, Any]:
    """The configuration as Alertmanager 0.25 and newer reads it."""
    return {
        "route": _route(timings, options),
        # Alerts of one cluster mute none of another.
        "inhibit_rules": [each.rule(options.matchers) for each in INHIBITIONS],
        "receivers": [*receivers.configured(), {"name": _NOBODY}],
    }


def _route(timings: Timings, options: RuleOptions) -> dict[str, Any]:
    return {
        "receiver": TICKET,
        # `model_name` is vLLM's own label of the model.
        "group_by": ["alertname", "objective", "model", "model_name", *options.matchers],
        "group_wait": timings.hold(30),
        "group_interval": timings.hold(5 * MINUTE_S),
        "repeat_interval": timings.hold(24 * HOUR_S),
        "routes": [
            {
                "receiver": DEADMAN,
                "matchers": [f'alertname="{WATCHDOG}"'],
                "group_wait": "0s",
                "group_interval": timings.hold(MINUTE_S),
                "repeat_interval": timings.hold(MINUTE_S),
            },
            {"receiver": _NOBODY, "matchers": [options.matcher(Severity.NONE)]},
            {
                "receiver": PAGE,
                "matchers": [options.matcher(Severity.PAGE)],
                "group_wait": timings.hold(10),
                "repeat_interval": timings.hold(4 * HOUR_S),
            },
        ],
    }
