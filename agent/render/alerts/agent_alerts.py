"""Alerts on the agents themselves, and the one that always fires."""

from collections.abc import Iterator
from dataclasses import dataclass

from agent.catalog import metrics as m
from agent.catalog.metric import Metric
from agent.render.alerts.alert_conditions import MIN_COUNT, conditions, share_over
from agent.render.alerts.alert_rule import AGENT, Alert, Severity
from agent.render.alerts.timings import Timings
from agent.render.promql import TARGET_LABELS, by, eq, value_of

_MINUTE_S = 60
_DAY_S = 24 * 60 * _MINUTE_S

WATCHDOG = "Watchdog"

# Rows wait longer than this for their commit, on average; and some wait at most looks.
_BEHIND_S, _LEAST_WAITING = 30, 1


@dataclass(frozen=True, slots=True)
class _Lost:
    """A counter of what an agent could not do, by a label that says why."""

    name: str
    metric: Metric
    label: str
    what: str


_LOSSES = (
    _Lost("LlmAgentExportsRefused", m.EXPORTS_REFUSED, "reason", "refuses OTLP bodies"),
    _Lost("LlmAgentForwardDropping", m.FORWARD_DROPPED, "reason", "does not forward OTLP bodies"),
    _Lost("LlmAgentProxyFailing", m.PROXY_FAILURES, "reason", "does not measure proxied requests"),
    _Lost("LlmAgentStoreFailing", m.STORE_FAILURES, "what", "cannot write to its database"),
)


def agent_alerts(timings: Timings) -> Iterator[Alert]:
    """Every alert on agents."""
    yield watchdog("goodput-agent")
    yield _down(timings)
    yield _missing()
    yield _rejecting(timings)
    for lost in _LOSSES:
        yield _losing(lost, timings)
    yield _behind(timings)


def watchdog(rules: str) -> Alert:
    """The alert that shows that alerts arrive; `rules` keeps it apart from that of another file."""
    return Alert(
        name=WATCHDOG,
        severity=Severity.NONE,
        expression="vector(1)",
        hold_s=0.0,
        summary="Alerts can be delivered",
        description="This alert always fires. Whoever receives it raises the alarm when it stays "
        "away: then Prometheus, Alertmanager or what lies between is broken.",
        dashboard=None,
        labels={"rules": rules},
    )


def _down(timings: Timings) -> Alert:
    # A target that is still configured, does not answer, and was an agent when it last did. One
    # that was taken out of the configuration is no failure.
    was_agent = by(
        TARGET_LABELS, f"max_over_time({value_of(m.AGENT_INFO)}[{timings.window(_DAY_S)}])", "max"
    )
    return Alert(
        name="LlmAgentDown",
        severity=Severity.PAGE,
        expression=f"up == 0\nand on ({', '.join(TARGET_LABELS)})\n{was_agent}",
        hold_s=2 * _MINUTE_S,
        summary="The agent {{ $labels.instance }} does not answer",
        description=f"Prometheus could not read it for {timings.hold(2 * _MINUTE_S)}. Until it is "
        "back, nothing is known of its engines and GPUs, and their alerts are silent.",
        variables=AGENT,
    )


def _missing() -> Alert:
    return Alert(
        name="LlmAgentsMissing",
        severity=Severity.PAGE,
        expression=f"absent({value_of(m.AGENT_INFO)})",
        hold_s=5 * _MINUTE_S,
        summary="Prometheus sees no agent at all",
        description=f"No series {value_of(m.AGENT_INFO)} exists: every agent is gone, or none is "
        "scraped. All other alerts of this file are blind.",
    )


def _rejecting(timings: Timings) -> Alert:
    window = timings.window(15 * _MINUTE_S)
    return Alert(
        name="LlmAgentSpansRejected",
        severity=Severity.TICKET,
        expression=share_over(
            "0.01",
            AGENT,
            window,
            part=value_of(m.SPANS, eq("outcome", "rejected")),
            whole=(value_of(m.SPANS),),
        ),
        hold_s=2 * _MINUTE_S,
        summary="The agent {{ $labels.instance }} cannot read spans that it receives",
        description=f"{{{{ $value | humanizePercentage }}}} of the spans over {window} were "
        f"rejected; {value_of(m.SPANS_REJECTED)} says why.",
        variables=AGENT,
    )


def _losing(lost: _Lost, timings: Timings) -> Alert:
    window = timings.window(15 * _MINUTE_S)
    counted = by((*AGENT, lost.label), f"increase({value_of(lost.metric)}[{window}])")
    return Alert(
        name=lost.name,
        severity=Severity.TICKET,
        expression=f"{counted} >= {MIN_COUNT}",
        hold_s=2 * _MINUTE_S,
        summary=f"The agent {{{{ $labels.instance }}}} {lost.what}: {{{{ $labels.{lost.label} }}}}",
        description=f"About {{{{ $value | humanize }}}} times over {window}.",
        variables=AGENT,
    )


def _behind(timings: Timings) -> Alert:
    window = timings.window(5 * _MINUTE_S)
    # A proxied row that was handed to the writer is in both figures, so they are not added up.
    waits = (_waits(metric, window) for metric in (m.STORE_WAITING, m.PROXY_WAITING))
    return Alert(
        name="LlmAgentStoreBehind",
        severity=Severity.TICKET,
        expression="\nor\n".join(f"(\n{wait}\n)" for wait in waits),
        hold_s=5 * _MINUTE_S,
        summary="The database of the agent {{ $labels.instance }} does not keep up",
        description=f"{{{{ $value | humanize }}}} rows wait for their commit on average over "
        f"{window}, more than the requests that were stored in {_BEHIND_S} s of it.",
        variables=AGENT,
    )


def _waits(metric: Metric, window: str) -> str:
    """More rows wait than come through in `_BEHIND_S`: by Little's law, for longer than that.

    Senders hold back while theirs wait, so that few rows may be all there are.
    """
    waiting = by(AGENT, f"avg_over_time({value_of(metric)}[{window}])")
    # Of two rows of one request only one is counted: this is no more than what was stored.
    stored = by(AGENT, f"rate({value_of(m.REQUESTS)}[{window}])")
    return conditions(f"{waiting}\n  > {_BEHIND_S} * {stored}", f"{waiting} >= {_LEAST_WAITING}")
