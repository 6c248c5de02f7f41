"""Faults on a running site: the right alert arrives at a webhook, alone, and ends.

All faults are made at the same time, each in its own place, so that one must not cause an alert on
another either. Every series that a rule selects existed on the site, with its labels and values.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from agent.catalog.gpu_problems import XIDS, XidGrade
from agent.render.alerts.gpu_alerts import MEMORY_XIDS
from agent.render.alerts.thresholds import MIN_EVENTS
from tests.end_to_end.site import GO_ON, STOP, Site, model_of
from tests.real_parts.alertmanager import WITHIN_S, PostedAlert
from tests.real_parts.waiting import eventually
from tests.render.alerts.cases import expressions, series_of
from tests.sources.nvml.fake_driver import gpu_uuid

pytestmark = pytest.mark.timeout(1200)

Act = Callable[[Site], None]


def _passes(site: Site) -> None:
    """Does nothing: the fault ends by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of the engine of the same name, of a GPU or of an agent, and its alert.

    `objective` has the settings of the engine's objective, if it has one. `beside`
    are tickets that may also fire.
    """

    name: str
    alert: str
    begin: Act
    end: Act = _passes
    objective: Mapping[str, Any] | None = None
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
        return named and (self.alert != _BURN or labels["severity"] == "critical")

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
        objective={"window": window},
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
    # Prometheus has just started, so its windows of hours and days hold seconds. With this target
    # nearly the same share of misses pages on the outage and on tier 2, whose window is longer.
    Fault(
        name=SLOW,
        alert="LlmObjectiveOutage",
        begin=_begin_slow_prefill,
        end=_end_slow_prefill,
        objective={"window": "15d", "target": 0.91},
        beside=frozenset({_BURN, "LlmTooFewReplicas"}),
    ),
    # The budget lasts for a while, so that tickets on latency may fire as early.
    _with_objective(
        "budget-burn",
        "1d",
        _BURN,
        *(_BURN, "LlmTtftOverLimit", "LlmQueueTimeHigh", "LlmTooFewReplicas"),
        defer_ratio=0.42,
        defer_s=0.6,
    ),
    # The objective is missed as well, and the page on the engine explains it.
    _with_objective("errors", "15d", "LlmEngineAnswersErrors", _BURN, error_ratio=0.8),
    # What waited meanwhile has its first token late.
    _with_objective("frozen", "15d", "LlmEngineHanging", _BURN, "LlmTooFewReplicas", hang=True),
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
        objective={"window": "15d"},
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


# What happens: nothing, then every fault at once, then their end.

# The watchdog is sent every three to six seconds, and no condition of these faults must hold for
# longer than fifteen.
QUIET, SETTLED = 3, 2

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Story:
    """Alerts before the faults, and alerts until all faults were over."""

    before: tuple[PostedAlert, ...]
    stirring: frozenset[str]
    all_: tuple[PostedAlert, ...]
    site: Site

    def of(self, fault: Fault) -> Mapping[Labels, list[str]]:
        """Alerts of a fault by their labels, each with its statuses in order.

        Alertmanager reports the end of a muted alert if another of its group was not muted; such an
        end without a beginning is left out.
        """
        found: dict[Labels, list[str]] = {}
        for alert in self.all_:
            key = frozenset(alert.labels.items())
            if fault.is_reported_by(alert, self.site) and (
                alert.status == "firing" or key in found
            ):
                found.setdefault(key, []).append(alert.status)
        return found


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """The whole story; the site keeps running until the last test."""
    engines = {fault.name: fault.objective for fault in FAULTS if fault.of_engine}
    with Site(tmp_path_factory.mktemp("site"), engines, ROLES) as site:
        _wait_for_every_engine(site)
        begun = _wait_for_calm(site)
        site.alerting.watch(QUIET)
        before, stirring = tuple(site.alerting.webhook.alerts()[begun:]), _stirring(site)
        for fault in FAULTS:
            fault.begin(site)
        _await(site, "firing")
        site.alerting.watch(SETTLED)
        for fault in FAULTS:
            fault.end(site)
        _await(site, "resolved")
        site.alerting.watch(SETTLED)
        yield Story(before, stirring, tuple(site.alerting.webhook.alerts()[begun:]), site)


def _wait_for_every_engine(site: Site) -> None:
    served = "count(rate(llm_requests_total{status='ok'}[10s]) > 0)"
    eventually(
        lambda: (
            [row["value"][1] for row in site.alerting.prometheus.query(served)]
            == [str(len(site.engines))]
        ),
        within_s=WITHIN_S,
        what="requests of every engine",
    )


def _wait_for_calm(site: Site) -> int:
    """The number of alerts while the site started: a busy machine may truly delay its polls."""
    eventually(lambda: _stirring(site) == {"LlmWatchdog"}, within_s=WITHIN_S, what="calm")
    if site.alerting.webhook.alerts():
        site.alerting.watch(SETTLED)
    return len(site.alerting.webhook.alerts())


def _stirring(site: Site) -> frozenset[str]:
    found = site.alerting.prometheus.query("ALERTS")
    return frozenset(row["metric"]["alertname"] for row in found)


def _await(site: Site, status: str) -> None:
    """Return when the alert of each fault had this status; the tests name missing ones."""

    def missing() -> list[str]:
        posted = [alert for alert in site.alerting.webhook.alerts() if alert.status == status]
        return [
            fault.name
            for fault in FAULTS
            if not any(
                fault.is_main(one.labels) and fault.is_reported_by(one, site) for one in posted
            )
        ]

    with suppress(AssertionError):
        eventually(lambda: not missing(), within_s=WITHIN_S, what=status)


# The requests of the client that asks for a model that does not exist.
_MISTAKES = (
    'llm_requests_total{{engine="slow-prefill",model!="simulated-slow-prefill",status="{}"}}'
)

each_fault = pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])


def test_without_a_fault_only_the_watchdog_fires(story: Story) -> None:
    assert story.before == ()
    assert story.stirring == {"LlmWatchdog"}
    assert {alert.name for alert in story.site.alerting.webhook.alerts("/deadman")} == {
        "LlmWatchdog"
    }


@each_fault
def test_a_fault_is_reported_by_its_alert_alone(story: Story, fault: Fault) -> None:
    alerts = [dict(labels) for labels in story.of(fault)]
    assert len([labels for labels in alerts if fault.is_main(labels)]) == 1
    others = [labels for labels in alerts if not fault.is_main(labels)]
    events = story.site.agent.api.events()
    of_engine = [event for event in events if event["engine"] == fault.name]
    assert {labels["alertname"] for labels in others} <= fault.beside, of_engine
    assert [labels for labels in others if labels["severity"] != "warning"] == []


@each_fault
def test_an_alert_ends_with_its_fault_and_does_not_fire_again(story: Story, fault: Fault) -> None:
    (statuses,) = [
        statuses for labels, statuses in story.of(fault).items() if fault.is_main(dict(labels))
    ]
    assert statuses[-1] == "resolved"
    assert "firing" not in statuses[statuses.index("resolved") :]


def test_a_clients_mistakes_are_counted_and_raise_no_alert(story: Story) -> None:
    prometheus = story.site.alerting.prometheus
    (row,) = prometheus.query(f"sum(last_over_time({_MISTAKES.format('invalid')}[1h]))")
    # More than any condition on failures asks for.
    assert float(row["value"][1]) > 10 * MIN_EVENTS.default
    (failed,) = prometheus.query(f"sum(last_over_time({_MISTAKES.format('error')}[1h]))")
    assert float(failed["value"][1]) == 0
    raised = 'ALERTS{alertname=~"LlmRequestsFailing|LlmMissesExplained",%s}[1h]'
    for label in (f'engine="{SLOW}"', f'objective="{SLOW}"'):
        assert prometheus.query(f"last_over_time({raised % label})") == []


def test_no_alert_fires_without_a_fault(story: Story) -> None:
    strays = [
        alert
        for alert in story.all_
        if not any(fault.is_reported_by(alert, story.site) for fault in FAULTS)
    ]
    assert strays == []


# Causes without a ticket of their own.
GRADED = sorted(xid.number for xid in XIDS.values() if xid.grade is not XidGrade.WARNING)

NOT_THERE = {
    # GPUs older than Ampere retire pages.
    "gpu_page_retirement_pending",
    # Of agents that publish.
    "llm_agent_lost_rows_total",
    "llm_agent_publish_lag_seconds",
    # Of agents with a proxy before several engines.
    "llm_proxy_engine_in_rotation",
    "llm_proxy_requests_forced_total",
    # Of agents that find their engines in Kubernetes.
    "llm_agent_discovery_failures_total",
    # Of agents that push their metrics.
    "llm_agent_metrics_push_dropped_total",
    # No engine is of a pool.
    "llm_engine_role",
    # The engines have one rank, draft nothing and offload nothing.
    'llm_engine_rank_skew_ratio{measure="requests"}',
    *("llm_engine_spec_decode_drafts_total", "llm_engine_spec_decode_accepted_tokens_total"),
    *("llm_engine_kv_offload_load_seconds_total", "llm_engine_kv_offload_tier_read_seconds_total"),
    # No upgrade renames a series.
    "llm_engine_fact_missing",
    # Xids of another grade than that of the fault.
    f'gpu_xid_last_seen_timestamp_seconds{{xid!~"{"|".join(map(str, GRADED))}"}}',
    # No GPU has a memory error.
    f'gpu_xid_last_seen_timestamp_seconds{{xid=~"{"|".join(map(str, MEMORY_XIDS))}"}}',
    # Limits unknown to the rules, which exist only with different settings.
    *(
        f'llm_slo_limit_seconds{{objective="{fault.name}",measure!~"ttft|tpot"}}'
        for fault in FAULTS
        if fault.objective is not None
    ),
}


def test_each_selector_found_its_series(story: Story) -> None:
    selected = {
        series
        for expression in expressions(yaml.safe_load(story.site.alerting.rules.read_text()))
        for series in series_of(expression)
        # No objective here is of the usual period.
        if not series.startswith("ALERTS{") and 'objective!~"' not in series
    }
    missing = {
        series
        for series in selected
        if not story.site.alerting.prometheus.query(f"last_over_time({series}[1h])")
    }
    assert missing == NOT_THERE, "\n".join(sorted(missing ^ NOT_THERE))
    assert len(selected) > 60
