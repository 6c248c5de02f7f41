"""Alerts on agents whose objectives differ from the objectives of these rules."""

from agent.catalog import metrics as m
from agent.catalog.time_units import MINUTE_S
from agent.records.objective import Objective
from agent.render.alerts.alert_rule import AGENT, Alert, Severity
from agent.render.alerts.number_text import latency, number, percent
from agent.render.promql import by, eq, filled, none_of, value_of

_HOLD_S = 10.0 * MINUTE_S
# The field of each limit, by its value of the label `measure`.
_LIMITS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}


def not_published(objective: Objective) -> Alert:
    """The alert on an objective of these rules that no agent has."""
    return Alert(
        name="LlmObjectiveNotPublished",
        severity=Severity.TICKET,
        expression=f"absent({value_of(m.SLO_REQUESTS, eq('objective', objective.name))})",
        hold_s=_HOLD_S,
        labels={"objective": objective.name},
        summary=f"No agent publishes objective {objective.name}",
        description=f"Prometheus has no {value_of(m.SLO_REQUESTS)} of objective {objective.name}: "
        "the agents' settings and these rules do not agree, or no agent is scraped.",
        variables=("objective",),
    )


def differs(objective: Objective) -> Alert:
    """The alert on an agent that judges an objective by other limits or another target."""
    limits_s = _limits_s(objective)
    limits = [f"{name} {latency(limit_s)}" for name, limit_s in limits_s.items()]
    return Alert(
        name="LlmObjectiveDiffers",
        severity=Severity.TICKET,
        expression=_difference(objective, limits_s),
        hold_s=_HOLD_S,
        labels={"objective": objective.name},
        summary=f"The agent {{{{ $labels.instance }}}} judges objective {objective.name} by other "
        "limits than these rules",
        description=f"These rules are made for {', '.join([percent(objective.target), *limits])}. "
        f"The agent judges by{_judged_by(objective)}. A rule on a limit that is no bucket edge "
        "never fires.",
        variables=("objective", "instance"),
    )


def _limits_s(objective: Objective) -> dict[str, float]:
    limits_s = {name: getattr(objective, field) for name, field in _LIMITS.items()}
    return {name: limit_s for name, limit_s in limits_s.items() if limit_s is not None}


def _difference(objective: Objective, limits_s: dict[str, float]) -> str:
    named = eq("objective", objective.name)
    target = by(AGENT, value_of(m.SLO_TARGET, named), "max")
    found = [f"{target} != {number(objective.target)}"]
    for name, limit_s in limits_s.items():
        limit = by(AGENT, value_of(m.SLO_LIMIT, named, eq("measure", name)), "max")
        found += [f"{limit} != {number(limit_s)}", f"{target}\n  unless {limit}"]
    more = value_of(m.SLO_LIMIT, named, none_of("measure", limits_s))
    return "\nor\n".join([*found, by(AGENT, more, "max")])


def _judged_by(objective: Objective) -> str:
    """A template for the target and the limits of the agent that the alert is on."""
    matchers = (filled("instance"), eq("objective", objective.name))
    target, limits = value_of(m.SLO_TARGET, *matchers), value_of(m.SLO_LIMIT, *matchers)
    share = f"{_each(target)} {{{{ .Value | humanizePercentage }}}}{{{{ end }}}}"
    return f"{share}{_each(limits)}, {{{{ .Labels.measure }}}} {{{{ .Value }}}} s{{{{ end }}}}"


def _each(series: str) -> str:
    return f"{{{{ range query (printf `sort({series})` $labels.instance) }}}}"
