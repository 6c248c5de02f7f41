"""Alerts on the agents themselves, and the watchdog, which always fires."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from inspect import cleandoc

from agent.catalog import metrics as m
from agent.catalog import own_health as own
from agent.catalog.metric import Metric
from agent.catalog.time_units import DAY_S, MINUTE_S
from agent.render.alerts.alert_rule import (
    AGENT,
    Alert,
    Severity,
    Timings,
    share_over,
    target_down,
)
from agent.render.alerts.thresholds import LATE_S, MIN_EVENTS, SPANS_REJECTED_RATIO, STORE_WAIT_S
from agent.render.links import DashboardUid
from agent.render.promql import eq, value_of

WATCHDOG = "LlmWatchdog"

_alert = partial(Alert, dashboard=DashboardUid.AGENTS)

# The mean number of waiting rows below which the store is not behind.
_LEAST_WAITING = 1


@dataclass(frozen=True, slots=True)
class _Loss:
    """A counter of an agent's failures, with a label for the reason."""

    name: str
    metric: Metric
    label: str
    what: str


_LOSSES = (
    _Loss("LlmAgentExportsRefused", m.EXPORTS_REFUSED, "reason", "refuses OTLP bodies"),
    _Loss("LlmAgentForwardDropping", m.FORWARD_DROPPED, "reason", "does not forward OTLP bodies"),
    _Loss("LlmAgentPushDropping", own.PUSH_DROPPED, "reason", "does not push its metrics"),
    _Loss("LlmAgentDiscoveryFailing", own.DISCOVERY_FAILURES, "reason", "cannot find its engines"),
    _Loss(
        "LlmAgentProxyFailing",
        m.PROXY_FAILURES,
        "reason",
        "does not measure requests of the proxy or the plugin",
    ),
    _Loss("LlmAgentStoreFailing", m.STORE_FAILURES, "what", "cannot write to its database"),
    _Loss("LlmAgentRowsLost", m.LOST_ROWS, "reason", "loses rows that it should publish"),
)


@dataclass(frozen=True, slots=True)
class _Late:
    """A gauge of how late some of the agent's work is, with a label for which."""

    name: str
    metric: Metric
    label: str
    what: str


_LATE = (
    _Late("LlmAgentStageBehind", own.STAGE_LAG, "stage", "is behind with its work"),
    _Late("LlmAgentJobLate", own.JOB_LATE, "job_name", "does not get round to a job"),
)


def agent_alerts(timings: Timings) -> Iterator[Alert]:
    """Every alert on agents."""
    yield watchdog("goodput-agent")
    yield _down(timings)
    yield _missing()
    yield _rejecting(timings)
    for loss in _LOSSES:
        yield _losing(loss, timings)
    yield _behind(timings)
    for late in _LATE:
        yield _too_late(late, timings)
    yield _publishing_behind()


def watchdog(rules: str) -> Alert:
    """The alert that proves the delivery of alerts; the label `rules` names its rule file."""
    return Alert(
        name=WATCHDOG,
        severity=Severity.NONE,
        expression="vector(1)",
        summary="Alerts can be delivered",
        description="This alert always fires. Its receiver must raise the alarm when it stops "
        "arriving: then Prometheus, Alertmanager or a connection between them is broken.",
        dashboard=None,
        labels={"rules": rules},
    )


def _down(timings: Timings) -> Alert:
    return _alert(
        name="LlmAgentDown",
        severity=Severity.PAGE,
        expression=target_down(value_of(m.AGENT_INFO), timings.window(DAY_S)),
        hold_s=2 * MINUTE_S,
        summary="The agent {{ $labels.instance }} does not answer",
        description=f"Every scrape failed for {timings.hold(2 * MINUTE_S)}. Until the agent is "
        "back, the state of its engines and GPUs is unknown, and their alerts cannot fire.",
        variables=AGENT,
    )


def _missing() -> Alert:
    return _alert(
        name="LlmAgentsMissing",
        severity=Severity.PAGE,
        expression=f"absent({value_of(m.AGENT_INFO)})",
        hold_s=5 * MINUTE_S,
        summary="Prometheus sees no agent at all",
        description=f"No series {value_of(m.AGENT_INFO)} exists: every agent is gone, or none is "
        "scraped. No other alert of this file can fire.",
    )


def _rejecting(timings: Timings) -> Alert:
    window, spans = timings.window(15 * MINUTE_S), value_of(m.SPANS)
    rejected = value_of(m.SPANS, eq("outcome", "rejected"))
    return _alert(
        name="LlmAgentSpansRejected",
        severity=Severity.TICKET,
        expression=share_over(SPANS_REJECTED_RATIO, AGENT, window, part=rejected, whole=(spans,)),
        hold_s=2 * MINUTE_S,
        summary="The agent {{ $labels.instance }} cannot read spans that it receives",
        description=f"{{{{ $value | humanizePercentage }}}} of the spans over {window} were "
        f"rejected; {value_of(m.SPANS_REJECTED)} has the reasons.",
        variables=AGENT,
    )


def _losing(loss: _Loss, timings: Timings) -> Alert:
    window = timings.window(15 * MINUTE_S)
    return _alert(
        name=loss.name,
        severity=Severity.TICKET,
        expression=f"sum by (instance, {loss.label}) (increase({value_of(loss.metric)}[{window}]))"
        f" >= {MIN_EVENTS}",
        hold_s=2 * MINUTE_S,
        summary=f"The agent {{{{ $labels.instance }}}} {loss.what}: {{{{ $labels.{loss.label} }}}}",
        description=f"About {{{{ $value | humanize }}}} times over {window}.",
        variables=AGENT,
    )


def _behind(timings: Timings) -> Alert:
    window = timings.window(5 * MINUTE_S)
    return _alert(
        name="LlmAgentStoreBehind",
        severity=Severity.TICKET,
        expression=_rows_wait(window),
        hold_s=5 * MINUTE_S,
        summary="The database of the agent {{ $labels.instance }} does not keep up",
        description=f"{{{{ $value | humanize }}}} rows wait for their commit on average over "
        f"{window}, more than the requests that were stored in {STORE_WAIT_S} s of it.",
        variables=AGENT,
    )


def _rows_wait(window: str) -> str:
    """More rows wait than are stored in STORE_WAIT_S: by Little's law, each waits for longer.

    Senders pause while their rows wait, so a small number may already be all rows. Of two rows of
    one request only one is counted: the rate is at most what was stored. Both gauges count a
    proxied row that the writer has, so their sum would count it twice.
    """
    of_store, of_proxy = value_of(m.STORE_WAITING), value_of(m.PROXY_WAITING)
    requests = value_of(m.REQUESTS)
    return cleandoc(f"""
        (
        sum by (instance) (avg_over_time({of_store}[{window}]))
          > {STORE_WAIT_S} * sum by (instance) (rate({requests}[{window}]))
        and
        sum by (instance) (avg_over_time({of_store}[{window}])) >= {_LEAST_WAITING}
        )
        or
        (
        sum by (instance) (avg_over_time({of_proxy}[{window}]))
          > {STORE_WAIT_S} * sum by (instance) (rate({requests}[{window}]))
        and
        sum by (instance) (avg_over_time({of_proxy}[{window}])) >= {_LEAST_WAITING}
        )
    """)


def _too_late(late: _Late, timings: Timings) -> Alert:
    return _alert(
        name=late.name,
        severity=Severity.TICKET,
        expression=f"max by (instance, {late.label}) ({value_of(late.metric)}) > {LATE_S}",
        hold_s=5 * MINUTE_S,
        summary=f"The agent {{{{ $labels.instance }}}} {late.what}: {{{{ $labels.{late.label} }}}}",
        description="It is {{ $value | humanizeDuration }} late.",
        variables=AGENT,
    )


def _publishing_behind() -> Alert:
    return _alert(
        name="LlmAgentPublishingBehind",
        severity=Severity.TICKET,
        expression=f"max by (instance) ({value_of(m.PUBLISH_LAG)}) > {LATE_S}",
        hold_s=5 * MINUTE_S,
        summary="The shared database does not get the rows of the agent {{ $labels.instance }}",
        description="It has lacked some for {{ $value | humanizeDuration }}. What waits for "
        "longer than storage.keep_in_file is dropped.",
        variables=AGENT,
    )
